"""Statistics and pictures of completion lengths (R9)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.engines.protocol import Completion
from lightrft.ops.collectives import ALONE
from lightrft.ops.lengths import (
    Lengths,
    LengthStatistics,
    gather_lengths,
    length_statistics,
    lengths_of,
    merge,
    should_plot,
    summary,
    write_histogram,
)

NONE = Lengths((), ())

some_lengths = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=30).map(
    lambda pairs: Lengths(tuple(tokens for tokens, _ in pairs), tuple(cut for _, cut in pairs))
)


def test_R9_a_small_case_by_hand() -> None:
    completions = [
        Completion((1,), (0,) * length, None, "length" if length == 10 else "stop") for length in (1, 2, 3, 4, 10, 10)
    ]
    lengths = lengths_of(completions)
    assert lengths == Lengths((1, 2, 3, 4, 10, 10), (False, False, False, False, True, True))
    assert length_statistics(lengths) == LengthStatistics(6, 5.0, 3.5, 10.0, 10, 1 / 3)
    assert summary(length_statistics(lengths)) == (
        "lengths of 6 completions: mean 5.0, p50 4, p80 10, max 10, cut short 33%"
    )


def test_R9_of_nothing_everything_is_zero() -> None:
    assert length_statistics(NONE) == LengthStatistics(0, 0.0, 0.0, 0.0, 0, 0.0)
    assert "no completions" in summary(length_statistics(NONE))


@given(some_lengths.filter(lambda lengths: len(lengths.tokens) > 0))
def test_R9_equals_numpy(lengths: Lengths) -> None:
    statistics, tokens = length_statistics(lengths), np.array(lengths.tokens)
    assert statistics.count == len(tokens)
    assert math.isclose(statistics.mean, tokens.mean())
    assert math.isclose(statistics.p50, np.percentile(tokens, 50), abs_tol=1e-9)
    assert math.isclose(statistics.p80, np.percentile(tokens, 80), abs_tol=1e-9)
    assert statistics.max == tokens.max()
    assert math.isclose(statistics.truncated_share, np.mean(lengths.truncated))


@given(st.lists(some_lengths, max_size=4))
def test_R9_statistics_of_ranks_are_those_of_all_completions_together(parts: list[Lengths]) -> None:
    together = merge(parts)
    assert len(together.tokens) == sum(len(part.tokens) for part in parts)
    assert merge([merge(parts[:2]), merge(parts[2:])]) == together
    assert length_statistics(merge(reversed(parts))) == length_statistics(together)


def test_R9_gathering_keeps_lengths_and_flags() -> None:
    lengths = Lengths((4, 2, 9), (False, True, False))
    assert gather_lengths(lengths, ALONE.all_gather) == lengths
    assert gather_lengths(NONE, ALONE.all_gather) == NONE


def test_R9_lengths_and_flags_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="2 lengths and 1 flags"):
        Lengths((1, 2), (True,))


def test_R9_plots_every_so_many_steps() -> None:
    assert [step for step in range(7) if should_plot(step, 3)] == [0, 3, 6]
    assert not any(should_plot(step, every) for step in range(5) for every in (-1, 0))


def test_R9_histogram_to_tensorboard_and_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]  # no py.typed
        EventAccumulator,
    )

    for step, tokens in ((1, (3, 5, 5)), (20, (0,))):
        picture = write_histogram(Lengths(tokens, (False,) * len(tokens)), tmp_path, step)
        assert picture is not None
        assert picture == tmp_path / "lengths" / f"step{step:06d}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["histograms"] == ["rollout/output_length"]
    assert write_histogram(NONE, tmp_path, 3) is None
    assert len(list((tmp_path / "lengths").iterdir())) == 2
