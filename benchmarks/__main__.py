"""``python -m benchmarks [import step parity sharded ... grpo]``: measures, prints, writes RESULTS.md."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints, grpo, import_time, parity, rollouts, sharded_step, step_time
from benchmarks.figures import Figure

SUBJECTS: dict[str, Callable[[], list[Figure]]] = {
    "import": import_time.measure,
    "step": step_time.measure,
    "parity": parity.measure,
    "sharded": sharded_step.measure,
    "checkpoints": checkpoints.measure,
    "rollouts": rollouts.measure,
    "grpo": grpo.measure,
}
RESULTS = Path(__file__).with_name("RESULTS.md")
COLUMNS = ("figure", "lightrft", "rival", "ratio", "target", "met", "note")


def cells(figure: Figure) -> tuple[str, ...]:
    """One line of the table."""
    ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
    met = "" if figure.met is None else "yes" if figure.met else "no"
    return (figure.name, figure.ours, figure.rival, ratio, figure.target, met, figure.note)


def versions() -> str:
    """What was measured."""
    found = []
    for package in ("lightrft", "torch", "deepspeed", "transformers", "trl"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def markdown(figures: list[Figure]) -> str:
    """The whole of RESULTS.md."""
    head = (
        "# Results\n\n"
        "Made by `make bench`. Every figure alternates lightrft and its rival in one run on one machine; medians.\n"
        "`ratio` is lightrft's figure over the rival's.\n\n"
        f"{datetime.date.today()}, Python {platform.python_version()}, {os.cpu_count()} cores, {versions()}\n\n"
    )
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(cells, figures)]
    return head + "".join("| " + " | ".join(row) + " |\n" for row in rows)


def main(chosen: list[str]) -> None:
    """Measures the chosen subjects, or all."""
    unknown = set(chosen) - SUBJECTS.keys()
    if unknown:
        sys.exit(f"no such benchmark: {', '.join(sorted(unknown))}. There are {', '.join(SUBJECTS)}.")
    console = Console()
    figures: list[Figure] = []
    for name, measure in SUBJECTS.items():
        if not chosen or name in chosen:
            with console.status(f"measuring {name}"):
                figures += measure()
    table = Table(*COLUMNS)
    for figure in figures:
        table.add_row(*cells(figure))
    console.print(table)
    if not chosen:
        RESULTS.write_text(markdown(figures), encoding="utf-8")
        console.print(f"written: {RESULTS}")


if __name__ == "__main__":
    main(sys.argv[1:])
