"""What is asked of vLLM, and what follows from its answers and faults: on a stand-in, so without vLLM."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, evolve, field, frozen
from hypothesis import given
from hypothesis import strategies as st

from lightrft.conformance.engines import Letters
from lightrft.engines.expected_weights import Model
from lightrft.engines.protocol import Capabilities, Completion, Request, Sampling
from lightrft.engines.stops import string_end
from lightrft.engines.vllm import VllmEngine, VllmState
from lightrft.engines.vllm_setup import check_world, environment, parts_of_vllm, remove_dead_segments
from lightrft.errors import EngineError, MissingDependency, UnsupportedOperation
from lightrft.ops.world import World

EXPECTED = {"embed.weight": (4, 2), "a.weight": (2, 2), "b.weight": (3,), "head.weight": (4, 2)}
FIRST = {**{name: name for name in EXPECTED}, "head.weight": "embed.weight"}
WHOLE = [("embed.weight", torch.ones(4, 2)), ("a.weight", torch.ones(2, 2)), ("b.weight", torch.ones(3))]


@frozen
class Logprob:
    logprob: float


@frozen
class Output:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = "length"


@frozen
class RequestOutput:
    outputs: list[Output]


@define
class StandIn:
    """``vllm.LLM``: notes what it is asked, counts up from the prompt's last token."""

    calls: list[tuple[object, ...]] = field(factory=list)
    fault: Callable[[str], None] = lambda call: None
    flushed: bool = True
    unfinished: bool = False
    finish_reason: str = "length"

    @property
    def llm_engine(self) -> StandIn:
        return self

    def note(self, name: str, *rest: object) -> None:
        self.calls.append((name, *rest))
        self.fault(name)

    def generate(
        self, prompts: Sequence[Mapping[str, Any]], sampling_params: Sequence[Any], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        self.note("generate", prompts, sampling_params)
        return [
            RequestOutput([self.output(prompt, params)])
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def output(self, prompt: Mapping[str, Any], params: Mapping[str, Any]) -> Output:
        ids = [prompt["prompt_token_ids"][-1] + 1 + place for place in range(params["max_tokens"])]
        logprobs = None if params["logprobs"] is None else [{token: Logprob(-token / 10)} for token in ids]
        return Output(ids, logprobs, self.finish_reason)

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[object, ...] = ()) -> object:
        self.note(method, *args)
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.note("reset_prefix_cache")
        return self.flushed

    def has_unfinished_requests(self) -> bool:
        return self.unfinished

    def reset_encoder_cache(self) -> None:
        self.note("reset_encoder_cache")

    def sleep(self, level: int = 1) -> None:
        self.note("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.note("wake_up", tags)

    @property
    def names(self) -> list[object]:
        return [call[0] for call in self.calls]


def engine_of(llm: StandIn, **fields: Any) -> VllmEngine:
    def params(**settings: object) -> object:
        return settings

    engine = VllmEngine(
        state=VllmState(llm, incomplete=False),
        make_params=params,
        model=Model(128, 64, (2,)),
        max_model_len=64,
        tokenizer=Letters(),
        knows_tokenizer=False,
        expected=EXPECTED,
        first_names=FIRST,
        dtype=torch.float32,
        device=torch.device("cpu"),
        bucket_bytes=1 << 20,
        seed=7,
        release=lambda llm: None,
        capabilities=Capabilities(sleep=True, multimodal=True),
    )
    return evolve(engine, **fields)


def seeds(call: tuple[object, ...]) -> list[object]:
    params: Any = call[2]
    return [one["seed"] for one in params]


def test_R1_R8_FC37_every_sample_is_a_row_of_its_own_and_what_comes_back_is_whole() -> None:
    llm = StandIn()
    done = engine_of(llm).generate([Request((5,)), Request((9, 8))], Sampling(n=2, max_new_tokens=2, seed=1))
    assert done[0] == Completion((5,), (6, 7), (-0.6, -0.7), "length")
    assert [one.prompt_token_ids for one in done] == [(5,), (5,), (9, 8), (9, 8)]
    (call,) = llm.calls
    assert [dict(prompt) for prompt in call[1]] == [{"prompt_token_ids": ids} for ids in ([5], [5], [9, 8], [9, 8])]  # type: ignore[attr-defined]
    assert len(set(seeds(call))) == 4


def test_R7_sampling_in_vllms_words() -> None:
    llm = StandIn()
    engine = engine_of(llm)
    some = Sampling(max_new_tokens=3, temperature=0.5, top_p=0.9, top_k=4, stop="x", stop_token_ids=(5, 2), seed=3)
    engine.generate([Request((5,), seed=8)], some)
    engine.generate([Request((5,))], Sampling(temperature=0.0, logprobs=False))
    engine.generate([Request((5,))], Sampling(temperature=0.0))
    evolve(engine, knows_tokenizer=True).generate([Request((5,))], Sampling(stop=("x", "yz"), temperature=0.0))
    assert llm.names == ["lightrft_divide_logits", "generate", "lightrft_divide_logits", *["generate"] * 3]
    assert (llm.calls[0][1], llm.calls[2][1]) == (0.5, 1.0)
    first: Any = llm.calls[1][2]
    assert {**first[0], "seed": 0} == {
        "max_tokens": 3,
        "temperature": 1.0,  # it is in the logits
        "top_p": 0.9,
        "top_k": 4,
        "seed": 0,
        "stop_token_ids": [2, 5],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    greedy: Any = llm.calls[3][2]
    assert (greedy[0]["temperature"], greedy[0]["seed"], greedy[0]["logprobs"]) == (0.0, None, None)
    native: Any = llm.calls[5][2]
    assert (native[0]["stop"], native[0]["include_stop_str_in_output"]) == (["x", "yz"], True)


def test_FC42_unseeded_calls_follow_the_engines_seed_and_a_requests_seed_goes_before_all() -> None:
    llm, same, other = StandIn(), StandIn(), StandIn()
    engine = engine_of(llm)
    for _ in range(2):
        engine.generate([Request((5,)), Request((5,), seed=1)], Sampling())
    engine_of(same).generate([Request((5,)), Request((5,), seed=1)], Sampling())
    engine_of(other, seed=8).generate([Request((5,)), Request((5,), seed=1)], Sampling(seed=None))
    first, second = map(seeds, llm.calls)
    assert seeds(same.calls[0]) == first
    assert len({first[0], second[0], seeds(other.calls[0])[0]}) == 3
    assert first[1] == second[1] == seeds(other.calls[0])[1]


def test_R8_only_known_reasons_come_out() -> None:
    for said, meant in {"stop": "stop", "length": "length", "abort": "abort", "repetition": "abort"}.items():
        engine = engine_of(StandIn(finish_reason=said))
        assert engine.generate([Request((5,))], Sampling())[0].finish_reason == meant


def test_R7_a_stop_string_cuts_what_vllm_made_too_long() -> None:
    (done,) = engine_of(StandIn()).generate([Request((97,))], Sampling(max_new_tokens=9, stop="de"))
    assert (done.output_token_ids, done.finish_reason) == ((98, 99, 100, 101), "stop")
    assert done.logprobs == pytest.approx((-9.8, -9.9, -10.0, -10.1))


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_R7_the_end_of_a_stop_string_is_the_first_place_that_holds_it(text: str, stop: list[str]) -> None:
    expected = next((end for end in range(len(text) + 1) if any(one in text[:end] for one in stop)), None)
    assert string_end(Letters(), list(map(ord, text)), stop) == expected


# ------------------------------------------------------------------------------------------------------------- weights


def test_R2_an_update_is_started_sent_in_buckets_and_finished() -> None:
    llm = StandIn()
    engine = engine_of(llm, bucket_bytes=33, state=VllmState(llm, incomplete=True))
    engine.update_weights(iter([*WHOLE, ("head.weight", torch.zeros(4, 2))]))
    assert llm.names == ["lightrft_start_update", *["lightrft_load_weights"] * 2, "lightrft_finish_update"]
    sent: Any = [call[1] for call in llm.calls if call[0] == "lightrft_load_weights"]
    assert [[name for name, _ in bucket] for bucket in sent] == [["embed.weight"], ["a.weight", "b.weight"]]
    assert len(engine.generate([Request((5,))], Sampling())) == 1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (("c.weight", torch.ones(1)), r"no parameter 'c\.weight'"),
        (("b.weight", torch.ones(4)), r"'b\.weight' is of shape \(3,\), got \(4,\)"),
        (None, r"not given 1 of its weights, such as 'b\.weight'"),
    ],
)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_R2_FC32_what_does_not_fit_is_named_and_nothing_half_is_served(
    bad: tuple[str, torch.Tensor] | None, says: str, bucket_bytes: int
) -> None:
    llm = StandIn()
    engine = engine_of(llm, bucket_bytes=bucket_bytes)
    with pytest.raises(EngineError, match=says):
        engine.update_weights([*WHOLE[:2], *([bad] if bad else [])])
    begun = bucket_bytes == 1 or bad is None
    assert llm.names.count("lightrft_start_update") == llm.names.count("lightrft_finish_update") == begun
    if begun:
        with pytest.raises(EngineError, match=r"strategy\.update_engine_weights\(actor\) first"):
            engine.generate([Request((5,))], Sampling())
        engine.update_weights(WHOLE)
    assert len(engine.generate([Request((5,))], Sampling())) == 1


def test_FC34_two_hundred_small_weights_take_five_calls() -> None:
    llm = StandIn()
    names = {f"w{place}": (256,) for place in range(200)}
    engine = engine_of(llm, expected=names, first_names={name: name for name in names}, bucket_bytes=64_000)
    engine.update_weights((name, torch.zeros(256)) for name in names)
    assert llm.names.count("lightrft_load_weights") <= 5


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("call", ["generate", "lightrft_load_weights", "lightrft_finish_update"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_engine_that_died_says_so_and_can_only_be_closed(call: str, kind: type[BaseException]) -> None:
    def fault(name: str) -> None:
        if name == call:
            raise kind("out of memory")

    released: list[object] = []
    llm = StandIn(fault=fault, unfinished=True)
    engine = engine_of(llm, release=released.append)

    def use() -> None:
        engine.update_weights(WHOLE)
        engine.generate([Request((5,))], Sampling())

    with pytest.raises(EngineError if kind is RuntimeError else kind, match="out of memory"):
        use()
    made = len(llm.calls)
    for again in (use, engine.flush_cache, engine.sleep, engine.wake_up):
        with pytest.raises(EngineError, match=r"died .*out of memory.*setup_inference_engine"):
            again()
    assert len(llm.calls) == made
    engine.close()
    engine.close()
    assert released == [llm]


@pytest.mark.parametrize("unfinished", [True, False])
def test_R5_what_vllm_itself_refuses_is_said_and_the_engine_lives_if_nothing_is_left_in_it(unfinished: bool) -> None:
    faults = [ValueError("1 image and 2 placeholders")]

    def fault(name: str) -> None:
        if faults:
            raise faults.pop()

    engine = engine_of(StandIn(fault=fault, unfinished=unfinished))
    says = "died" if unfinished else "refused a request, and nothing was generated"
    with pytest.raises(EngineError, match=f"{says}.*1 image and 2 placeholders"):
        engine.generate([Request((5,))], Sampling())
    assert (engine.state.died_of is not None) == unfinished


def test_R4_FC35_vllm_sees_one_sleep_and_one_wake_weights_before_caches() -> None:
    llm = StandIn()
    engine = engine_of(llm)
    engine.wake_up()
    for _ in range(2):
        engine.sleep()
    for asked in (lambda: engine.generate([Request((5,))], Sampling()), lambda: engine.update_weights(WHOLE)):
        with pytest.raises(EngineError, match=r"sleeps and cannot .* wake_up\(\) first"):
            asked()
    for _ in range(2):
        engine.wake_up()
    assert llm.calls == [("sleep", 1), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert len(engine.generate([Request((5,))], Sampling())) == 1


def test_R4_FC12_after_a_sleep_without_weights_it_waits_for_them() -> None:
    engine = engine_of(StandIn())
    engine.sleep(2)
    engine.wake_up()
    with pytest.raises(EngineError, match="update_engine_weights"):
        engine.generate([Request((5,))], Sampling())
    engine.update_weights(WHOLE)
    assert len(engine.generate([Request((5,))], Sampling())) == 1


def test_FC35_a_wake_that_failed_can_be_tried_again() -> None:
    faults = [RuntimeError("no memory")]

    def fault(name: str) -> None:
        if name == "wake_up" and faults:
            raise faults.pop()

    engine = engine_of(StandIn(fault=fault))
    engine.sleep()
    with pytest.raises(RuntimeError, match="no memory"):
        engine.wake_up()
    engine.wake_up()
    assert len(engine.generate([Request((5,))], Sampling())) == 1


def test_R2_FC11_caches_are_dropped_or_it_is_said() -> None:
    llm = StandIn()
    engine_of(llm).flush_cache()
    assert llm.names == ["reset_prefix_cache", "reset_encoder_cache"]
    with pytest.raises(EngineError, match="prefix cache"):
        engine_of(StandIn(flushed=False)).flush_cache()


def test_R6_pictures_travel_or_are_refused() -> None:
    llm, request = StandIn(), Request((5,), images=("i",), videos=("v", "w"))
    engine = engine_of(llm)
    engine.generate([request, Request((6,))], Sampling())
    prompts: Any = llm.calls[0][1]
    assert prompts[0]["multi_modal_data"] == {"image": ["i"], "video": ["v", "w"]}
    assert "multi_modal_data" not in prompts[1]
    with pytest.raises(UnsupportedOperation, match="text alone"):
        evolve(engine, capabilities=Capabilities()).generate([request], Sampling())
    with pytest.raises(UnsupportedOperation, match="CUDA only"):
        evolve(engine, capabilities=Capabilities()).sleep()


# --------------------------------------------------------------------------------------------------------------- set-up


@pytest.fixture(autouse=True)
def _what_was_imported_of_a_stand_in_is_forgotten() -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(before)


def stand_in_package(directory: Path, files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    monkeypatch.syspath_prepend(str(directory))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


RELOAD = {
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": "",
    "vllm/model_executor/model_loader/reload.py": "initialize_layerwise_reload = finalize_layerwise_reload = print",
    "vllm/platforms.py": "class current_platform:\n    is_sleep_mode_available = staticmethod(lambda: True)",
}
NEW = {"vllm/__init__.py": "class LLM: ...\nclass SamplingParams: ...", **RELOAD}
OLD = {
    "vllm/__init__.py": "",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/llm.py": "class LLM: ...",
    "vllm/sampling_params.py": "class SamplingParams: ...",
    **RELOAD,
}


@pytest.mark.parametrize("files", [OLD, NEW], ids=["old", "new"])
def test_FC41_the_parts_of_vllm_are_found_in_either_layout(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_package(tmp_path, files, monkeypatch)
    llm, params, sleeps = parts_of_vllm()
    assert (getattr(llm, "__name__", None), getattr(params, "__name__", None), sleeps) == (
        "LLM",
        "SamplingParams",
        True,
    )


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (
            {"vllm/__init__.py": "raise ImportError('undefined symbol')"},
            r"importing vllm failed: .*undefined symbol.*0\.20",
        ),
        ({"vllm/__init__.py": "import no_such_module"}, r"importing vllm failed: .*no_such_module.*0\.20"),
        ({"vllm/__init__.py": ""}, r"has no LLM .*0\.20 or later"),
        ({**NEW, "vllm/model_executor/model_loader/reload.py": ""}, r"no initialize_layerwise_reload .*0\.20 or later"),
    ],
)
def test_FC41_a_broken_vllm_is_an_error_with_what_was_found_and_what_is_supported(
    broken: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_package(tmp_path, broken, monkeypatch)
    with pytest.raises(EngineError, match=says):
        parts_of_vllm()


def test_FC40_without_vllm_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependency, match=r"pip install 'lightrft\[vllm\]'"):
        parts_of_vllm()


def test_W1_the_environment_is_afterwards_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    before = dict(os.environ)

    def set_up() -> None:
        with environment(World(rank=3, world_size=4)):
            assert (os.environ["RANK"], os.environ["VLLM_LOGGING_LEVEL"]) == (before.get("RANK", "3"), "INFO")
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            os.environ["VLLM_MADE_MEANWHILE"] = "1"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        set_up()
    assert dict(os.environ) == before


def test_ranks_that_cannot_be_dealt_out_are_refused() -> None:
    check_world(1, World())
    with pytest.raises(EngineError, match="engine_tp_size=3 does not divide the 4 ranks"):
        check_world(3, World(world_size=4))
    with pytest.raises(EngineError, match="setup_distributed"):
        check_world(2, World(world_size=4))


def test_what_a_killed_run_left_in_shared_memory_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    dead, live, others = (tmp_path / f"-tp:0-[{ranks}]-cpushm_0" for ranks in ("0-1", "2-3", "4-5"))
    for file in (dead, live, others):
        file.write_bytes(b"x" * 4096)
    with live.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
        for ranks in (range(2), range(2, 4)):
            remove_dead_segments(ranks, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([live, others])
