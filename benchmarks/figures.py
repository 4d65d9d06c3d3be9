"""A figure: what was measured, against what, and the target."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from attrs import frozen


@frozen(kw_only=True)
class Figure:
    """One line of RESULTS.md. ``ratio`` is ours over the rival's, in the unit of ``target``'s text."""

    name: str
    ours: str
    rival: str
    ratio: float | None
    target: str
    met: bool | None
    """None where there is no target."""
    note: str = ""


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def alternate(contenders: Sequence[Callable[[], object]], rounds: int, warm_up: int = 2) -> list[list[float]]:
    """Seconds of every contender, turn by turn, so that what disturbs the machine disturbs all of them."""
    for _ in range(warm_up):
        for contender in contenders:
            contender()
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(rounds):
        order = range(len(contenders)) if turn % 2 == 0 else reversed(range(len(contenders)))
        for index in order:
            times[index].append(seconds(contenders[index]))
    return times


def paired_ratio(ours: Sequence[float], rival: Sequence[float]) -> float:
    """The median of the ratios of neighbouring turns: steadier than the ratio of two medians."""
    return statistics.median(mine / theirs for mine, theirs in zip(ours, rival, strict=True))


def spread(ours: Sequence[float], rival: Sequence[float]) -> str:
    """The middle half of the ratios of neighbouring turns, to read."""
    low, _, high = statistics.quantiles([mine / theirs for mine, theirs in zip(ours, rival, strict=True)], n=4)
    return f"{low:.3f} to {high:.3f}"


def milliseconds(values: Sequence[float]) -> str:
    """The median, to read."""
    return f"{1e3 * statistics.median(values):.2f} ms"
