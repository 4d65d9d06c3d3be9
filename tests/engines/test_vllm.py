"""The laws of engines on real vLLM (`make test-engines`)."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import os
import random
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch.nn import Module

pytest.importorskip("vllm")

from lightrft import StrategyConfig, get_strategy
from lightrft.conformance.engines import (
    ENGINE_LAWS,
    LIMIT,
    TOLERANCE,
    EngineLaw,
    Letters,
    check_engine,
    drift,
    long_prompts,
    named,
    outputs,
    requests,
    save,
    small_model,
)
from lightrft.engines.protocol import Engine, Request, Sampling
from lightrft.engines.table import line
from lightrft.engines.vllm import VllmEngine
from lightrft.engines.vllm_setup import vllm
from lightrft.errors import EngineError, UnsupportedOperation
from lightrft.rlvr.config import TrainConfig
from lightrft.rlvr.session import run

pytestmark = pytest.mark.engines

TYPINGS = Path(__file__).parents[2] / "typings" / "vllm"
BUCKET = 40_000
"""Bytes: several buckets an update, and single weights that are larger."""


class Engines:
    """One engine for each kind of model, kept for all laws, in the order in which they were made."""

    def __init__(self) -> None:
        self.made: dict[bool, VllmEngine] = {}

    def __call__(self, directory: Path, tokenizer: Letters | None) -> Engine:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory)
        tied = bool(model.config.tie_word_embeddings)
        if tied not in self.made:
            self.made[tied] = vllm(directory, tokenizer, dtype=torch.float32, bucket_bytes=BUCKET)
        else:
            self.made[tied].update_weights(named(model))
            self.made[tied].flush_cache()
        return self.made[tied]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    for engine in reversed(made.made.values()):
        engine.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("law", [pytest.param(law, id=law.name) for law in ENGINE_LAWS])
def test_vllm_obeys(law: EngineLaw, tied: bool, engines: Engines, tmp_path: Path) -> None:
    assert check_engine(law, engines, tmp_path, tied=tied)


@pytest.fixture
def tied(engines: Engines, tmp_path: Path) -> VllmEngine:
    save(small_model(tied=True), tmp_path)
    engine = engines(tmp_path, Letters())
    assert isinstance(engine, VllmEngine)
    return engine


def test_the_documents_say_what_it_can_do_here(tied: VllmEngine) -> None:
    page = Path(__file__).parents[2] / "docs" / "engines.md"
    assert line("`vllm`", tied.capabilities) in page.read_text()


def test_R2_a_part_of_the_weights_is_refused_and_not_served(tied: VllmEngine) -> None:
    model = small_model(tied=True, seed=1)
    some = list(named(model))[:-1]
    with pytest.raises(EngineError, match=r"not given 1 of its weights, such as 'model\.norm\.weight'"):
        tied.update_weights(some)
    with pytest.raises(EngineError, match=r"strategy\.update_engine_weights\(actor\) first"):
        tied.generate([Request((1,))], Sampling())
    tied.update_weights([*reversed(list(named(model))), ("lm_head.weight", dict(some)["model.embed_tokens.weight"])])
    tied.flush_cache()
    assert drift(model, tied.generate(long_prompts(), Sampling(max_new_tokens=4))) <= TOLERANCE


def test_R2_an_update_that_is_refused_before_it_began_leaves_the_old_weights(tied: VllmEngine) -> None:
    with pytest.raises(EngineError, match="no parameter 'nothing'"):
        tied.update_weights([("nothing", torch.zeros(1))])
    assert drift(small_model(tied=True), tied.generate(long_prompts(), Sampling(max_new_tokens=4))) <= TOLERANCE


def test_R3_a_hundred_updates_add_no_memory(tied: VllmEngine) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    model = small_model(tied=True)
    size = sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(20):
        tied.update_weights(named(model))
    before = resident()
    for _ in range(100):
        tied.update_weights(named(model))
    assert resident() - before < 10 * size  # a copy kept each time would be 100


def test_R4_vllm_on_the_cpu_says_that_it_cannot_sleep(tied: VllmEngine) -> None:
    if not tied.capabilities.sleep:
        with pytest.raises(UnsupportedOperation, match="CUDA only"):
            tied.sleep()


def test_R5_pictures_for_a_model_of_text_are_refused(tied: VllmEngine) -> None:
    with pytest.raises(UnsupportedOperation, match="text alone"):
        tied.generate([Request((1,), images=(object(),))], Sampling())


def test_R5_what_vllm_refuses_leaves_it_alive(tied: VllmEngine) -> None:
    before = tied.generate([Request((1,))], Sampling(temperature=0.0))
    with pytest.raises(EngineError, match=f"refused a request.*{LIMIT}"):
        evolve(tied, max_model_len=None).generate(requests([(1,), (1,) * (LIMIT + 9), (2,)]), Sampling())
    assert outputs(tied.generate([Request((1,))], Sampling(temperature=0.0))) == outputs(before)


def test_a_vllm_that_died_says_so_and_can_be_closed() -> None:
    model = small_model(tied=True)
    engine = vllm(model)
    engine.update_weights(named(model))
    engine = evolve(engine, model=evolve(engine.model, vocab_size=1 << 41))
    for _ in range(2):
        with pytest.raises(EngineError, match="died while it generated: OverflowError"):
            engine.generate(requests([(1,), (1 << 40,)]), Sampling())
    engine.close()
    assert not torch.distributed.is_initialized()


def test_the_stubs_say_what_is_true() -> None:
    for stub in sorted(TYPINGS.rglob("*.pyi")):
        module = import_module(
            ".".join(stub.relative_to(TYPINGS.parent).with_suffix("").parts).removesuffix(".__init__")
        )
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name != "QuantizeMethodBase":
                parameters = inspect.signature(getattr(module, node.name)).parameters
                for name in () if "args" in parameters else arguments_of(node):
                    assert name in parameters, f"{stub}: {node.name} has no {name}"


def arguments_of(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Of a function, or of a class's ``__init__``."""
    functions = (
        [node] if isinstance(node, ast.FunctionDef) else [f for f in node.body if isinstance(f, ast.FunctionDef)]
    )
    made = [one for one in functions if one.name in (node.name, "__init__")]
    return [
        argument.arg for one in made for argument in (*one.args.args, *one.args.kwonlyargs) if argument.arg != "self"
    ]


def test_R7_ends_of_a_sequence_are_the_models_and_the_tokenizers_and_nothing_shipped_leaks(tmp_path: Path) -> None:
    model: Any = small_model(tied=True)
    prompt = (7, 7, 1)
    sampling = Sampling(max_new_tokens=8, temperature=2.0, seed=3)
    engine = vllm(model, None, LIMIT)
    engine.update_weights(named(model))
    free = list(engine.generate([Request(prompt)], sampling)[0].output_token_ids)
    engine.close()
    assert len(free) == 8
    model.generation_config.eos_token_id = [free[4], VOCABULARY_END]
    model.generation_config.update(do_sample=True, top_p=0.1, top_k=3, temperature=0.2, repetition_penalty=5.0)
    tokenizer = Letters()
    tokenizer.eos_token_id = free[2]
    for given, end in ((None, 5), (tokenizer, 3)):
        engine = vllm(copy.deepcopy(model), given, LIMIT)
        engine.update_weights(named(model))
        (ended,) = engine.generate([Request(prompt)], sampling)
        engine.close()
        assert (list(ended.output_token_ids), ended.finish_reason) == (free[: free.index(free[end - 1]) + 1], "stop")


VOCABULARY_END = 127


def test_R7_stop_strings_with_a_tokenizer_that_vllm_has_too(tmp_path: Path) -> None:
    from lightrft.rlvr.models import tiny_model, tiny_tokenizer

    model: Any = tiny_model()
    tokenizer: Any = tiny_tokenizer()
    engine = vllm(model, tokenizer)
    assert engine.knows_tokenizer
    engine.update_weights(named(model))
    prompt = tokenizer.encode("one two", add_special_tokens=False)
    sampling = Sampling(max_new_tokens=20, temperature=3.0, seed=1)
    (free,) = engine.generate([Request(prompt)], sampling)
    stop = tokenizer.decode(list(free.output_token_ids[6:8]))
    (stopped,) = engine.generate([Request(prompt)], Sampling(max_new_tokens=20, temperature=3.0, seed=1, stop=stop))
    assert (stopped.output_token_ids, stopped.finish_reason) == (free.output_token_ids[:8], "stop")
    engine.close()


def test_W4_setting_up_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    def process() -> tuple[object, ...]:
        return (
            dict(os.environ),
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # type: ignore[index]  # the old form of the state
            torch.set_num_threads,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )

    model = small_model(tied=False)
    before = process()
    engine = vllm(model)
    assert process() == before
    engine.update_weights(named(model))
    torch.set_grad_enabled(True)
    engine.generate(requests([(1, 2)]), Sampling(seed=1))
    engine.generate(requests([(1, 2)]), Sampling())
    assert process()[1:] == before[1:]
    threads = threading.active_count()
    engine.close()
    engine.close()
    assert threading.active_count() <= threads
    with pytest.raises(EngineError, match="is closed"):
        engine.generate([Request((1,))], Sampling())


def test_R2_R4_through_the_strategy(caplog: pytest.LogCaptureFixture) -> None:
    strategy = get_strategy(StrategyConfig(bf16=False, engine_type="vllm", enable_engine_sleep=True))
    strategy.setup_distributed()
    actor: Module = strategy.prepare(small_model(tied=True, seed=2))
    strategy.setup_inference_engine(None, engine_type="vllm", actor=actor)
    prompts = [request.prompt_token_ids for request in long_prompts()]
    with pytest.raises(EngineError, match=r"strategy\.update_engine_weights\(actor\) first"):
        strategy.gather_and_generate(Sampling(), all_prompt_token_ids=prompts)
    completions = []
    for seed in (0, 1):
        actor.load_state_dict(small_model(tied=True, seed=seed).state_dict())
        strategy.update_engine_weights(actor)
        for _ in range(2):
            completions = strategy.gather_and_generate(Sampling(n=2, max_new_tokens=5, seed=1), prompts)
            assert drift(actor, completions) <= TOLERANCE
    from vllm import SamplingParams

    native = strategy.gather_and_generate(SamplingParams(n=2, max_tokens=5, seed=1, logprobs=0), prompts)
    assert outputs(native) == outputs(completions)
    assert sum("cannot sleep" in record.getMessage() for record in caplog.records) == 1
    strategy.close()


def test_R2_a_run_trains_on_what_vllm_generates_and_logs_how_far_apart_the_two_are(tmp_path: Path) -> None:
    strategy = StrategyConfig(
        bf16=False,
        engine_type="vllm",
        train_batch_size=8,
        micro_train_batch_size=8,
        n_samples_per_prompt=4,
        actor_learning_rate=1e-2,
        lr_warmup_ratio=0.0,
    )
    config = TrainConfig(
        model="tiny",
        task="copy",
        reward="support:varied",
        steps=3,
        max_new_tokens=6,
        temperature=0.8,
        top_p=0.9,
        eval_limit=4,
        output=str(tmp_path / "run"),
        strategy=strategy,
    )
    run(config, quiet=True)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in metrics if "rollout_gap" in step]
    assert len(steps) == 3
    assert all(step["grad_norm"] > 0.01 for step in steps)
    assert all(step["rollout_gap"] < 1e-5 for step in steps)  # stale weights: 0.1 and more at this rate


def test_S2_a_directory_without_a_model_and_a_model_that_vllm_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        vllm(tmp_path)
    with pytest.raises(EngineError, match="Linear"):
        vllm(torch.nn.Linear(2, 2))
    model: Any = small_model(tied=True)
    before = dict(os.environ)
    with pytest.raises(EngineError, match=r"could not be set up.*no_such_setting"):
        vllm(model, options={"no_such_setting": 1})
    assert dict(os.environ) == before
