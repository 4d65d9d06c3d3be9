"""The laws of engines on real SGLang, on the CPU (`make test-engines`). No test runs it in this process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from torch.nn import Module

from lightrft import StrategyConfig, get_strategy
from lightrft.conformance.engines import (
    ENGINE_LAWS,
    TOLERANCE,
    EngineLaw,
    Letters,
    a_request_has_its_own_draws,
    a_seed_repeats,
    check_engine,
    drift,
    long_prompts,
    named,
    small_model,
)
from lightrft.engines import sglang_process as host
from lightrft.engines.protocol import Engine, Request, Sampling
from lightrft.engines.sglang import SglangEngine, sglang
from lightrft.engines.table import line
from lightrft.errors import EngineError, UnsupportedOperation
from lightrft.strategy.protocol import Strategy

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
]

SUPPORT = Path(__file__).parent / "sglang_support"
BUCKET = 40_000
"""Bytes: several buckets an update, and single weights that are larger."""
SEEDED = (a_seed_repeats, a_request_has_its_own_draws)
GREEDY = Sampling(max_new_tokens=4, temperature=0.0)


def surroundings() -> list[object]:
    """What ``sglang.Engine`` changes of the process that makes it."""
    return [
        dict(os.environ),
        [signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT)],
        multiprocessing.get_start_method(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        torch.get_num_threads(),
    ]


@define
class Engines:
    """Started once each: of a directory, with its weights; and by a strategy of an actor, whose weights come later."""

    of_directory: SglangEngine | None = None
    strategy: Strategy | None = None
    of_actor: SglangEngine | None = None
    untouched: bool = False
    """Setting up the second changed nothing in this process."""
    actor: Module = field(factory=lambda: small_model(tied=False, seed=5))

    def __call__(self, directory: Path, tokenizer: Letters | None) -> Engine:
        from transformers import AutoModelForCausalLM

        if self.of_directory is None:
            self.of_directory = sglang(
                directory,
                tokenizer,
                device=torch.device("cpu"),
                dtype=torch.float32,
                bucket_bytes=BUCKET,
                can_sleep=True,
            )
        else:
            self.of_directory.update_weights(named(AutoModelForCausalLM.from_pretrained(directory)))
            self.of_directory.flush_cache()
        return self.of_directory

    def with_strategy(self) -> tuple[Strategy, SglangEngine]:
        if self.strategy is None or self.of_actor is None:
            self.strategy = get_strategy(StrategyConfig(engine_type="sglang", bf16=False, backend="local"))
            before = surroundings()
            made = self.strategy.setup_inference_engine(SimpleNamespace(tokenizer=Letters()), "sglang", self.actor)
            self.untouched = surroundings() == before
            self.of_actor = cast("SglangEngine", made)
        return self.strategy, self.of_actor


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT))
        yield made
    if made.of_directory is not None:
        made.of_directory.close()
    if made.strategy is not None:
        made.strategy.close()


def test_R2_an_actor_gives_its_config_alone_and_nothing_here_is_touched(engines: Engines) -> None:
    strategy, engine = engines.with_strategy()
    page = Path(__file__).parents[2] / "docs" / "engines.md"
    assert line("`sglang`", engine.capabilities) in page.read_text()
    assert engines.untouched, "the process that asks for an engine was changed by it"
    with pytest.raises(EngineError, match="update_engine_weights"):
        engine.generate(long_prompts(), GREEDY)
    weights = list(named(engines.actor))
    with pytest.raises(EngineError, match=r"was not given 1 of its parameters, such as 'model\.norm\.weight'"):
        engine.update_weights([pair for pair in weights if pair[0] != "model.norm.weight"])
    with pytest.raises(EngineError, match="update_engine_weights"):
        engine.generate(long_prompts(), GREEDY)
    strategy.update_engine_weights(engines.actor)
    assert drift(engines.actor, engine.generate(long_prompts(), GREEDY)) <= TOLERANCE


def test_R1_R2_through_a_strategy(engines: Engines) -> None:
    strategy, _ = engines.with_strategy()
    strategy.update_engine_weights(engines.actor)
    prompts = [[3, 5, 8], [9], [3, 5, 8]]
    sampling = Sampling(max_new_tokens=3, n=2, temperature=2.0)
    completions = strategy.gather_and_generate(sampling, all_prompt_token_ids=prompts)
    assert [list(one.prompt_token_ids) for one in completions] == [prompt for prompt in prompts for _ in range(2)]
    assert drift(engines.actor, completions, 2.0) <= TOLERANCE


def test_R2_some_weights_may_follow_all_of_them(engines: Engines) -> None:
    strategy, engine = engines.with_strategy()
    strategy.update_engine_weights(engines.actor)
    new = small_model(tied=False, seed=6)
    with torch.no_grad():
        for (name, ours), (_, other) in zip(engines.actor.named_parameters(), new.named_parameters(), strict=True):
            if "layers.1" in name:
                ours.copy_(other)
    engine.update_weights((name, tensor) for name, tensor in named(engines.actor) if "layers.1" in name)
    assert drift(engines.actor, engine.generate(long_prompts(), GREEDY)) <= TOLERANCE


@pytest.mark.parametrize("law", [pytest.param(law, id=law.name) for law in ENGINE_LAWS])
def test_sglang_obeys(law: EngineLaw, engines: Engines, tmp_path: Path) -> None:
    if law.body in SEEDED:
        pytest.skip("SGLang heeds seeds in its deterministic mode alone, which needs CUDA")
    assert check_engine(law, engines, tmp_path)


@pytest.mark.parametrize("law", [pytest.param(law, id=law.name) for law in ENGINE_LAWS if law.updates])
def test_sglang_obeys_untied(law: EngineLaw, engines: Engines) -> None:
    strategy, engine = engines.with_strategy()
    model = small_model(tied=False)
    strategy.update_engine_weights(model)
    law.body(engine, model)


def test_R7_a_seed_that_is_not_heeded_is_said_once(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    strategy, made = engines.with_strategy()
    strategy.update_engine_weights(engines.actor)
    engine = evolve(made, serving=evolve(made.serving, said_no_seeds=False))
    assert not engine.capabilities.seeds
    with caplog.at_level(logging.WARNING, "lightrft"):
        engine.generate([Request((1,))], Sampling(max_new_tokens=1))
        assert not caplog.records
        for _ in range(2):
            engine.generate([Request((1,), seed=3)], Sampling(max_new_tokens=1))
    assert ["seed" in record.message for record in caplog.records] == [True]


def test_R4_on_the_cpu_it_says_that_it_cannot_sleep_and_asleep_it_refuses(engines: Engines, tmp_path: Path) -> None:
    _, cannot = engines.with_strategy()
    with pytest.raises(UnsupportedOperation, match="cannot sleep on the CPU"):
        cannot.sleep()
    model = small_model(tied=True)
    cast("Any", model).save_pretrained(tmp_path)
    engine = engines(tmp_path, Letters())
    engine.sleep(2)
    with pytest.raises(EngineError, match="wake_up"):
        engine.generate(long_prompts(), GREEDY)
    engine.wake_up()
    with pytest.raises(EngineError, match="update_engine_weights"):
        engine.generate(long_prompts(), GREEDY)
    engine.sleep()
    engine.update_weights(named(model))  # wakes its weights (FC12)
    with pytest.raises(EngineError, match="wake_up"):
        engine.generate(long_prompts(), GREEDY)
    engine.wake_up()
    assert drift(model, engine.generate(long_prompts(), GREEDY)) <= TOLERANCE


def test_R5_what_it_cannot_do_is_refused(engines: Engines) -> None:
    strategy, engine = engines.with_strategy()
    strategy.update_engine_weights(engines.actor)
    with pytest.raises(UnsupportedOperation, match="images"):
        engine.generate([Request((1,), images=(object(),))], GREEDY)
    with pytest.raises(EngineError, match="greedy to SGLang"):
        engine.generate([Request((1,))], Sampling(temperature=1e-7))


def test_R2_an_update_outside_a_session_is_refused_and_not_served(engines: Engines) -> None:
    strategy, engine = engines.with_strategy()
    strategy.update_engine_weights(engines.actor)
    ready = engine.host.ready
    engine.host.ready = evolve(ready, has_sessions=False)
    try:
        with pytest.raises(EngineError, match="begin_weight_update"):
            strategy.update_engine_weights(engines.actor)
    finally:
        engine.host.ready = ready
    with pytest.raises(EngineError, match="update_engine_weights"):
        engine.generate(long_prompts(), GREEDY)
    strategy.update_engine_weights(engines.actor)
    assert drift(engines.actor, engine.generate(long_prompts(), GREEDY)) <= TOLERANCE


def test_R5_an_engine_that_dies_while_generating_is_an_error_here_and_leaves_nothing(engines: Engines) -> None:
    """An empty prompt, past our checks, is an exception in SGLang's scheduler, which kills the process that made it."""
    strategy, engine = engines.with_strategy()
    strategy.update_engine_weights(engines.actor)
    assert engine.directory is not None
    directory = Path(engine.directory.name)
    assert directory.exists()
    psutil: Any = pytest.importorskip("psutil")
    its_own = [one for one in psutil.process_iter() if os.getpgid(one.pid) == engine.host.process.pid]
    assert len(its_own) >= 3
    with pytest.raises(EngineError, match="could not do generate: its process ended with exit code -9"):
        host.ask(engine.host, host.Generate([[]], [{"max_new_tokens": 1}], False))
    _, left = psutil.wait_procs(its_own, timeout=10)
    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []
    with pytest.raises(EngineError, match="closed"):
        engine.generate(long_prompts(), GREEDY)
    strategy.close()
    strategy.close()
    engines.strategy = None
    assert not directory.exists()
