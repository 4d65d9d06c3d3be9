"""What of the engine ``sglang`` can be checked without SGLang: packing, buckets, words, and in which order it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from lightrft.conformance.engines import Letters, named, save, small_model
from lightrft.engines import sglang_process as host
from lightrft.engines.expected_weights import expected_weights, first_names, model_of, refuse_misfits, write_config
from lightrft.engines.protocol import Sampling
from lightrft.engines.sglang import completion, in_words_of_sglang
from lightrft.errors import EngineError

pytest.importorskip("transformers")

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]
tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.booleans()), min_size=1, max_size=6
)


@given(tensors)
def test_R3_what_is_packed_arrives_bit_for_bit(kinds: list[tuple[torch.dtype, list[int], bool]]) -> None:
    generator = torch.Generator().manual_seed(0)
    made: list[tuple[str, torch.Tensor]] = []
    for dtype, shape, transposed in kinds:
        tensor = (torch.randn(shape, generator=generator) * 3).to(dtype)
        made.append((f"weight {len(made)}", tensor.T if transposed and tensor.dim() == 2 else tensor))
    arrived = host.unpack(host.pack(made))
    assert [name for name, _ in arrived] == [name for name, _ in made]
    for (_, one), (_, other) in zip(arrived, made, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)


@pytest.mark.parametrize("tied", [True, False])
def test_R2_expected_weights_are_those_of_the_model(tied: bool, tmp_path: Path) -> None:
    model = small_model(tied=tied)
    state = torch.get_rng_state()
    write_config(model, tmp_path)
    expected, firsts = expected_weights(tmp_path), first_names(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: expected[name] for name, _ in named(model)} == {n: tuple(t.shape) for n, t in named(model)}
    assert set(firsts.values()) == {name for name, _ in named(model)}
    assert (firsts["lm_head.weight"] == "model.embed_tokens.weight") == tied
    assert model_of(tmp_path).vocab_size == 128
    refuse_misfits("sglang", expected, named(model))


def test_R2_FC32_misfits_are_all_named_at_once(tmp_path: Path) -> None:
    write_config(small_model(tied=True), tmp_path)
    bad = [("module.lm_head.weight", torch.zeros(1)), ("model.norm.weight", torch.zeros(63))]
    with pytest.raises(EngineError, match=r"'module\.lm_head\.weight'.*\n.*'model\.norm\.weight'.*\(64,\).*\(63,\)"):
        refuse_misfits("sglang", expected_weights(tmp_path), bad)


def test_R2_config_of_a_saved_model_and_of_none(tmp_path: Path) -> None:
    model: Any = small_model(tied=True)
    model.generation_config.eos_token_id = [7, 9]
    save(model, tmp_path)
    assert model_of(tmp_path).eos_token_ids == (7, 9)
    with pytest.raises(EngineError, match=r"config\.json"):
        model_of(tmp_path / "nothing")
    with pytest.raises(EngineError, match="Linear"):
        write_config(torch.nn.Linear(1, 1), tmp_path)


# ------------------------------------------------------------------------------------------------------------- words


def test_R7_sampling_in_words_of_sglang() -> None:
    words = in_words_of_sglang(Sampling(max_new_tokens=3, temperature=0.5, top_p=0.9, top_k=4), (7, 8))
    assert words["max_new_tokens"] == 3
    assert (words["temperature"], words["top_p"], words["top_k"], words["n"]) == (0.5, 0.9, 4, 1)
    assert words["stop_token_ids"] == [7, 8]
    assert in_words_of_sglang(Sampling(), ())["top_k"] == -1
    one = in_words_of_sglang(Sampling(top_k=1, temperature=2.0), ())  # greedy there would change the log-probabilities
    assert (one["top_k"], one["top_p"]) == (-1, 1e-9)


@pytest.mark.parametrize(
    ("sampling", "finish", "length", "reason"),
    [
        (Sampling(), "length", 4, "length"),
        (Sampling(stop="b"), "length", 2, "stop"),
        (Sampling(stop="cd"), "length", 4, "stop"),
        (Sampling(stop="x"), "length", 4, "length"),
        (Sampling(stop_token_ids=[99]), "length", 3, "stop"),
        (Sampling(), "stop", 4, "stop"),
    ],
)
def test_R7_R8_where_a_completion_ends(sampling: Sampling, finish: str, length: int, reason: str) -> None:
    output = host.Output(tuple(map(ord, "abcd")), (-1.0, -2.0, -3.0, -4.0), finish)
    done = completion((1,), output, sampling, frozenset(sampling.stop_token_ids), Letters())
    assert (len(done.output_token_ids), done.finish_reason) == (length, reason)
    assert done.logprobs == (-1.0, -2.0, -3.0, -4.0)[:length]


def test_R8_what_sglang_gave_up_on_is_an_error() -> None:
    with pytest.raises(EngineError, match="out of memory"):
        completion((1,), host.Output((), None, "abort", "out of memory"), Sampling(), frozenset(), None)


# ------------------------------------------------------------------------------------------------- what is asked of it


@define
class Recorded:
    """In the place of ``sglang.Engine``: busy for some flushes, and answers updates as told."""

    busy: int = 0
    answer: tuple[bool, str] = (True, "Success")
    calls: list[str] = field(factory=list)
    success: bool = False

    def flush_cache(self) -> Recorded:
        self.calls.append("flush")
        self.busy -= 1
        self.success = self.busy < 0
        return self

    def release_memory_occupation(self) -> None:
        self.calls.append("release")

    def begin_weight_update(self) -> tuple[bool, str]:
        return self.answer

    def end_weight_update(self) -> tuple[bool, str]:
        return self.answer

    def update_weights_from_tensor(self, named_tensors: object, *, flush_cache: bool) -> tuple[bool, str]:
        return self.answer


def test_R4_memory_is_released_once_nothing_is_running() -> None:
    engine: Any = Recorded(busy=2)
    host.carry_out(engine, host.Release())
    assert engine.calls == ["flush", "flush", "flush", "release"]


def test_R4_an_engine_that_stays_busy_is_not_waited_for_without_end() -> None:
    engine: Any = Recorded(busy=1_000_000)
    with pytest.raises(TimeoutError, match="still running"):
        host.flush(engine, patience_s=0.01)


@pytest.mark.parametrize(
    "message",
    [host.Begin(), host.End(), host.Update(host.pack([("a", torch.zeros(1))]))],
    ids=lambda m: type(m).__name__,
)
def test_R2_an_update_that_sglang_did_not_do_is_an_error(message: host.Message) -> None:
    engine: Any = Recorded(answer=(False, "must run between"))
    with pytest.raises(RuntimeError, match="must run between"):
        host.carry_out(engine, message)
    assert host.carry_out(Recorded(), message) is None  # type: ignore[arg-type]  # stands in for the engine


def test_R2_a_process_that_ends_is_an_error_and_no_more() -> None:
    with pytest.raises(EngineError, match="could not start"):
        host.start({"model_path": "nothing", "no such argument": True})
