"""Prompts, sampling parameters and the engine's sleep, with an engine that records what it is asked."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st

from lightrft.engines.protocol import Capabilities, Completion, Request, Sampling
from lightrft.engines.scripted import ScriptedEngine, scripted
from lightrft.errors import ConfigError, EngineError, UnsupportedOperation
from lightrft.ops import rollout
from lightrft.ops.collectives import ALONE
from lightrft.ops.models import named_weights
from lightrft.ops.rollout import (
    as_requests,
    close_engine,
    generate_local,
    packed_ids,
    sleep_engine,
    sync_weights,
    unpacked_ids,
    wake_engine,
)
from lightrft.ops.sampling import SAMPLING_FIELDS, as_sampling
from lightrft.ops.world import World
from lightrft.strategy.record import EngineState, RunState

A, B = (1, 2, 3), (4, 5)
WEIGHTS = [("w", torch.zeros(2))]


@define
class Settings:
    enable_engine_sleep: bool = True
    plot_every: int = -1
    engine_tp_size: int = 1
    verify_weight_sync: bool = False
    log_dir: str | None = None


@define
class Run:
    """The parts of a RunState that a rollout touches."""

    engine: EngineState
    config: Settings = field(factory=Settings)
    world: World = World()


def generating(run: Run) -> rollout.Generating:
    """The run of a single rank."""
    return rollout.Generating(cast("RunState", run), ALONE)


def gather(
    state: EngineState,
    sampling: object,
    *,
    enable: bool = True,
    sleep_engine: bool = True,
    ids: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[str] | None = None,
    images: Sequence[object] | None = None,
    videos: Sequence[object] | None = None,
) -> list[Completion]:
    return rollout.gather_and_generate(
        generating(Run(state, Settings(enable))),
        sampling,
        all_prompt_token_ids=ids,
        all_prompts=prompts,
        all_images=images,
        sleep_engine=sleep_engine,
        all_videos=videos,
    )


def with_engine(engine: ScriptedEngine | None = None) -> tuple[EngineState, ScriptedEngine]:
    engine = engine or scripted()
    return EngineState(engine=engine), engine


# ----------------------------------------------------------------------------------------------------- R4: sleep, wake


def test_R4_FC35_sleep_and_wake_reach_the_engine_once_each() -> None:
    state, engine = with_engine()
    for act in (sleep_engine, sleep_engine, wake_engine, wake_engine):
        act(state)
    assert engine.operations == ["sleep", "wake_up"]


def test_R4_FC12_generating_and_updating_while_asleep_wakes_first() -> None:
    state, engine = with_engine()
    awake = generate_local(state, Sampling(seed=1), [A])
    sleep_engine(state)
    sync_weights(state, WEIGHTS)
    sleep_engine(state)
    assert generate_local(state, Sampling(seed=1), [A]) == awake
    assert engine.operations == [
        "generate",
        *("sleep", "wake_weights", "update_weights", "wake_up", "flush_cache"),
        *("sleep", "wake_up", "generate"),
    ]
    assert not state.asleep


@given(st.lists(st.sampled_from(["sleep", "wake", "generate", "update"]), max_size=12))
def test_R4_any_order_is_safe_and_the_state_is_the_engines(order: list[str]) -> None:
    state, engine = with_engine()
    acts: dict[str, Callable[[], object]] = {
        "sleep": lambda: sleep_engine(state),
        "wake": lambda: wake_engine(state),
        "generate": lambda: generate_local(state, Sampling(), [A]),
        "update": lambda: sync_weights(state, WEIGHTS),
    }
    for act in order:
        acts[act]()
        assert state.asleep == engine.state.asleep == (act == "sleep")
    assert engine.operations.count("sleep") - engine.operations.count("wake_up") == int(state.asleep)
    assert engine.operations.count("generate") == order.count("generate")


def test_R4_sleep_after_a_failed_generate_works() -> None:
    def fail(prompt: tuple[int, ...], sample: int) -> list[int]:
        raise OSError("injected")

    state, engine = with_engine(scripted(fail))
    sleep_engine(state)
    with pytest.raises(OSError, match="injected"):
        gather(state, Sampling(), ids=[A])
    sleep_engine(state)
    assert engine.operations == ["sleep", "wake_up", "generate", "sleep"]
    assert state.asleep
    assert state.rollouts == 0


@define
class Restless:
    """An engine whose waking fails a number of times, around a scripted one."""

    inner: ScriptedEngine
    failures: int

    @property
    def name(self) -> str:
        return "restless"

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def wake_up(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise EngineError("not yet")
        self.inner.wake_up()


def test_R4_FC35_a_failed_wake_can_be_tried_again() -> None:
    inner = scripted()
    state = EngineState(engine=cast("ScriptedEngine", Restless(inner, failures=2)))
    sleep_engine(state)
    for _ in range(2):
        with pytest.raises(EngineError, match="not yet"):
            generate_local(state, Sampling(), [A])
    assert state.asleep
    assert len(generate_local(state, Sampling(), [A])) == 1
    assert inner.operations == ["sleep", "wake_up", "generate"]


def test_R4_an_engine_that_cannot_sleep_says_so_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    state, engine = with_engine(scripted(can_sleep=False))
    with caplog.at_level(logging.WARNING, logger="lightrft"):
        for _ in range(3):
            sleep_engine(state)
            wake_engine(state)
            assert len(generate_local(state, Sampling(), [A])) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "scripted" in caplog.text
    assert engine.operations == ["generate"] * 3


def test_R4_without_an_engine_sleep_and_wake_do_nothing_and_work_names_the_next_step() -> None:
    state = EngineState()
    sleep_engine(state)
    wake_engine(state)
    close_engine(state)
    with pytest.raises(EngineError, match="setup_inference_engine"):
        generate_local(state, Sampling(), [A])
    with pytest.raises(EngineError, match="setup_inference_engine"):
        sync_weights(state, WEIGHTS)
    with pytest.raises(EngineError, match="setup_inference_engine"):
        gather(state, Sampling(), prompts=["a"])


def test_W3_close_reaches_the_engine_once() -> None:
    state, engine = with_engine()
    sleep_engine(state)
    close_engine(state)
    close_engine(state)
    assert engine.operations == ["sleep", "close"]
    assert state.engine is None
    assert not state.asleep


# ------------------------------------------------------------------------------------------------------ R1, R2: work


def test_R2_FC11_an_update_makes_the_engine_forget() -> None:
    state, engine = with_engine()
    sync_weights(state, iter(WEIGHTS))
    assert engine.operations == ["update_weights", "flush_cache"]
    assert engine.calls[0].names == ("w",)


def test_R2_the_actors_weights_travel_under_the_plain_models_names() -> None:
    state, engine = with_engine()
    actor = torch.nn.DataParallel(torch.nn.Linear(2, 1))
    rollout.update_engine_weights(rollout.Sending(cast("RunState", Run(state)), named_weights, ALONE), actor)
    assert engine.calls[0].names == ("weight", "bias")


def test_R1_FC36_FC37_order_and_adjacency() -> None:
    state, _ = with_engine(scripted(lambda prompt, sample: [prompt[0], sample]))
    got = gather(state, {"n": 3, "max_tokens": 2}, ids=[A, A, B])
    assert [one.output_token_ids for one in got] == [(t, s) for t in (1, 1, 4) for s in range(3)]
    assert [one.prompt_token_ids for one in got] == [A] * 6 + [B] * 3


def test_R1_no_prompts_give_no_completions_and_do_not_wake() -> None:
    state, engine = with_engine()
    sleep_engine(state)
    assert generate_local(state, Sampling(), []) == []
    assert gather(state, Sampling(), ids=[]) == []
    assert engine.operations == ["sleep"]


@pytest.mark.parametrize(
    ("enable", "asked", "sleeps"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_R4_it_sleeps_after_a_rollout_where_enabled_and_asked(enable: bool, asked: bool, sleeps: bool) -> None:
    state, engine = with_engine()
    gather(state, Sampling(), ids=[A], enable=enable, sleep_engine=asked)
    assert engine.operations == ["generate", *(["sleep"] if sleeps else [])]
    assert state.rollouts == 1


def test_R1_an_engine_that_loses_completions_is_caught() -> None:
    @define
    class Losing:
        name: str = "losing"

        def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            return scripted().generate(requests, sampling)[:-1]

    state = EngineState(engine=cast("ScriptedEngine", Losing()))
    with pytest.raises(EngineError, match=r"losing.* 3 completions for 2 prompts with n=2"):
        generate_local(state, Sampling(n=2), [A, B])


# -------------------------------------------------------------------------------------------------- R5: what is asked


def test_R5_exactly_one_kind_of_input() -> None:
    state, engine = with_engine()
    with pytest.raises(ValueError, match="neither"):
        generate_local(state, Sampling())
    with pytest.raises(ValueError, match="both"):
        generate_local(state, Sampling(), [A], [{}])
    with pytest.raises(ValueError, match="needs prompts"):
        gather(state, Sampling())
    assert engine.calls == []


def test_R5_media_are_refused_with_a_way_out_and_empty_media_are_none() -> None:
    state, engine = with_engine()
    refused: list[Callable[[], object]] = [
        lambda: generate_local(
            state, Sampling(), multi_modal_inputs=[{"prompt_token_ids": A, "multi_modal_data": {"image": object()}}]
        ),
        lambda: gather(state, Sampling(), ids=[A], images=[[object()]]),
        lambda: gather(state, Sampling(), ids=[A], images=[object()]),
        lambda: gather(state, Sampling(), ids=[A], videos=[[None, object()]]),
    ]
    for ask in refused:
        with pytest.raises(UnsupportedOperation, match="scripted"):
            ask()
    assert engine.calls == []
    assert len(gather(state, Sampling(), ids=[A, B], images=[None, []], videos=[])) == 2


def test_R5_text_needs_a_tokenizer() -> None:
    state, _ = with_engine()
    with pytest.raises(EngineError, match="no tokenizer"):
        gather(state, Sampling(), prompts=["ab"])

    class Letters:
        def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) for letter in text]

    @define
    class Reading:
        name: str = "reading"
        tokenizer: Letters = field(factory=Letters)
        capabilities: Capabilities = field(factory=Capabilities)

        def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            return scripted().generate(requests, sampling)

    reading = EngineState(engine=cast("ScriptedEngine", Reading()))
    assert [one.prompt_token_ids for one in gather(reading, Sampling(), prompts=["ab", "c"])] == [(97, 98), (99,)]
    assert [one.prompt_token_ids for one in gather(reading, Sampling(), prompts=["ab"], ids=[A])] == [A]


def test_R5_bad_prompts_are_named_and_the_engine_is_left_asleep() -> None:
    state, engine = with_engine()
    sleep_engine(state)
    bad_rows: list[object] = ["text", None, 5, [1.5], ["1"], [[1]], torch.tensor([1.0])]
    for bad in bad_rows:
        with pytest.raises(EngineError, match="prompt 1 is no list of token ids"):
            generate_local(state, Sampling(), cast("list[list[int]]", [[1], bad]))
    assert engine.operations == ["sleep"]
    with pytest.raises(EngineError, match="prompt 1: is empty"):
        generate_local(state, Sampling(), [A, []])


@given(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=5))
def test_R5_rows_of_any_kind_become_plain_ints(rows: list[list[int]]) -> None:
    want = [Request(tuple(row)) for row in rows]
    assert as_requests(rows) == want
    assert as_requests([tuple(row) for row in rows]) == want
    assert as_requests(cast("list[list[int]]", [torch.tensor(row, dtype=torch.long) for row in rows])) == want
    got = as_requests(cast("list[list[int]]", [np.array(row, dtype=np.int32) for row in rows]))
    assert got == want
    assert all(type(token) is int for request in got for token in request.prompt_token_ids)
    assert as_requests(cast("list[list[int]]", [list(np.array(row, dtype=np.int32)) for row in rows])) == want


# ------------------------------------------------------------------------------------------------- sampling parameters

samplings = st.builds(
    Sampling,
    max_new_tokens=st.integers(1, 99),
    temperature=st.floats(0.0, 3.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 50),
    n=st.integers(1, 8),
    stop=st.lists(st.text(min_size=1), max_size=2),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=2),
    seed=st.none() | st.integers(0, 9),
    logprobs=st.booleans(),
)


@given(samplings)
def test_R7_a_mapping_or_an_object_of_the_same_content_is_the_same_sampling(sampling: Sampling) -> None:
    content = {name: getattr(sampling, name) for name in SAMPLING_FIELDS}
    assert as_sampling(sampling) is sampling
    assert as_sampling(content) == sampling
    assert as_sampling(argparse.Namespace(**content)) == sampling
    content["max_tokens"] = content.pop("max_new_tokens")
    assert as_sampling(content) == sampling


@pytest.mark.parametrize(
    ("given_", "want"),
    [
        ({}, Sampling()),
        ({"max_tokens": 5, "top_k": -1, "logprobs": 0}, Sampling(max_new_tokens=5)),
        ({"logprobs": None, "stop": "x"}, Sampling(logprobs=False, stop="x")),
        ({"logprobs": 3, "stop": ["x"], "stop_token_ids": None}, Sampling(stop="x")),
        ({"min_p": 0, "repetition_penalty": 1, "skip_special_tokens": False}, Sampling()),
        ({"temperature": 1, "top_p": None}, Sampling()),
    ],
)
def test_R7_other_engines_words_are_understood(given_: Mapping[str, object], want: Sampling) -> None:
    assert as_sampling(given_) == want


def test_R7_an_engines_own_object_is_understood_and_nothing_of_it_is_ignored() -> None:
    like_vllm = argparse.Namespace(
        n=2, temperature=0.5, top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=[], stop_token_ids=[], max_tokens=7,
        min_tokens=0, logprobs=1, presence_penalty=0.0, repetition_penalty=1.0, ignore_eos=False, output_kind=0,
    )  # fmt: skip
    assert as_sampling(like_vllm) == Sampling(n=2, temperature=0.5, max_new_tokens=7)
    like_vllm.min_p = 0.1
    with pytest.raises(ConfigError, match=r"min_p=0\.1 is not carried out"):
        as_sampling(like_vllm)


def test_C2_one_error_lists_every_bad_sampling_parameter() -> None:
    bad = {
        "temprature": 1.0,
        "temperature": -1,
        "max_new_tokens": 8.5,
        "top_p": float("nan"),
        "n": True,
        "stop": [3],
        "top_k": -2,
        "repetition_penalty": 1.1,
    }
    with pytest.raises(ConfigError) as caught:
        as_sampling(bad)
    for name, value in bad.items():
        assert f"{name}={value!r}" in str(caught.value)
    with pytest.raises(ConfigError, match="given twice"):
        as_sampling({"max_tokens": 4, "max_new_tokens": 5})
    with pytest.raises(ConfigError, match="sampling parameters are needed, got None"):
        as_sampling(None)


def test_C4_the_callers_parameters_are_left_alone() -> None:
    given_ = {"max_tokens": 4, "stop": ["a"]}
    as_sampling(given_)
    assert given_ == {"max_tokens": 4, "stop": ["a"]}
    assert evolve(as_sampling(given_), stop="b").stop == ("b",)


def test_R9_lengths_are_told_every_so_many_rollouts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = EngineState(scripted())
    run = generating(Run(state, Settings(plot_every=2, log_dir=str(tmp_path))))
    with caplog.at_level("INFO", "lightrft"):
        for _ in range(4):
            rollout.gather_and_generate(run, Sampling(max_new_tokens=3), all_prompt_token_ids=[[1], [2]])
    assert [line.getMessage()[:9] for line in caplog.records if "lengths of 2" in line.getMessage()] == [
        "rollout 2",
        "rollout 4",
    ]
    assert [picture.name for picture in sorted((tmp_path / "lengths").iterdir())] == [
        "step000002.png",
        "step000004.png",
    ]


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 9), max_size=20), max_size=6))
def test_R1_packed_token_ids_come_out_as_they_went_in(rows: list[list[int]]) -> None:
    requests = as_requests(rows)
    packed = packed_ids(requests)
    assert packed["ids"].dtype == torch.int32
    assert unpacked_ids(packed["lengths"], packed["ids"]) == requests


def test_R1_an_id_that_no_tensor_holds_is_named() -> None:
    with pytest.raises(EngineError, match="prompt 1 has a token id that is in no vocabulary"):
        packed_ids(as_requests([[1], [2**31]]))
