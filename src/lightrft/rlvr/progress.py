"""What is seen of a run while it goes on: a live table on a terminal, a line a step elsewhere, two lines when quiet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from attrs import define, field
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

SHOWN: Mapping[str, tuple[str, str]] = {
    "reward": ("reward", "{:.3f}"),
    "accuracy": ("held-out accuracy", "{:.1%}"),
    "loss": ("loss", "{:+.4f}"),
    "grad_norm": ("gradient norm", "{:.3f}"),
    "kl": ("KL", "{:.4f}"),
    "length": ("length", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:.0f}"),
}
"""The metrics that are shown, in this order: label and format. What a run does not have is left out."""


class Show(Protocol):
    """Shows that ``step`` steps are made, and their metrics; names that are missing keep their last value."""

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> None: ...


@define
class Seen:
    """What is known so far."""

    total_steps: int
    start: int
    began: float
    step: int = 0
    metrics: dict[str, float] = field(factory=dict)

    def seconds_left(self, now: float) -> float | None:
        """The steps to come at the pace of those made here; None before the first."""
        made = self.step - self.start
        return (now - self.began) / made * (self.total_steps - self.step) if made > 0 else None


def clock_time(seconds: float) -> str:
    """75 -> ``1:15``, 3700 -> ``1:01:40``."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def shown(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Labels and texts of the metrics that are there."""
    for name, (label, form) in SHOWN.items():
        if name in metrics:
            yield label, form.format(metrics[name]) if math.isfinite(metrics[name]) else str(metrics[name])


def plain_line(seen: Seen, metrics: Mapping[str, float], now: float) -> str:
    """One step as one line."""
    width = len(str(seen.total_steps))
    parts = [f"step {seen.step:>{width}}/{seen.total_steps}", *(f"{label} {text}" for label, text in shown(metrics))]
    left = seen.seconds_left(now)
    if left is not None and seen.step < seen.total_steps:
        parts.append(f"left {clock_time(left)}")
    return "  ".join(parts)


def last_line(seen: Seen, now: float) -> str:
    """What the run came to."""
    ended = "done" if seen.step >= seen.total_steps else "stopped"
    results = {name: value for name, value in seen.metrics.items() if name in ("reward", "accuracy")}
    parts = [f"{ended}: step {seen.step}/{seen.total_steps}", *(f"{label} {text}" for label, text in shown(results))]
    return "  ".join([*parts, f"in {clock_time(now - seen.began)}"])


def live_table(seen: Seen, progress: Progress, now: float) -> Group:
    """The bar, and below it the metrics side by side."""
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    cells = list(shown(seen.metrics))
    left = seen.seconds_left(now)
    cells.append(("time left", clock_time(left) if left is not None else "-"))
    for label, _ in cells:
        table.add_column(label, header_style="dim", justify="right", no_wrap=True)
    table.add_row(*(text for _, text in cells))
    return Group(progress, table)


@contextmanager
def open_progress(
    total_steps: int,
    quiet: bool,
    terminal: bool | None = None,
    console: Console | None = None,
    *,
    start: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Show]:
    """Shows a run of ``total_steps`` steps of which ``start`` were made before; yields the function to call after each.

    ``terminal`` None means what the console says of itself. The last line is written also when the run is stopped.
    """
    out = console or Console()
    live = (out.is_terminal if terminal is None else terminal) and not quiet
    seen = Seen(total_steps, start, clock(), start)

    def line(text: str) -> None:
        out.print(text, highlight=False, markup=False, soft_wrap=True)

    def take(step: int, metrics: Mapping[str, float]) -> None:
        seen.step = step
        seen.metrics |= metrics

    def show_line(step: int, metrics: Mapping[str, float], /) -> None:
        take(step, metrics)
        if not quiet:
            line(plain_line(seen, metrics, clock()))

    line(f"training: {total_steps} steps" + (f", going on after step {start}" if start else ""))
    try:
        if live:
            with open_live(out, seen, take, clock) as show_live:
                yield show_live
        else:
            yield show_line
    finally:
        line(last_line(seen, clock()))


@contextmanager
def open_live(
    console: Console, seen: Seen, take: Callable[[int, Mapping[str, float]], None], clock: Callable[[], float]
) -> Iterator[Show]:
    """The live display; time left runs down between steps too."""
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TimeElapsedColumn())
    progress = Progress(*columns, console=console, expand=True)
    bar = progress.add_task("training", total=seen.total_steps, completed=seen.step)

    def draw() -> Group:
        return live_table(seen, progress, clock())

    with Live(get_renderable=draw, console=console, refresh_per_second=4):

        def show(step: int, metrics: Mapping[str, float], /) -> None:
            take(step, metrics)
            progress.update(bar, completed=step)

        yield show
