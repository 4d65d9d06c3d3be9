"""What a run leaves in its directory: config.toml, metrics.jsonl, TensorBoard files, transcripts.md, reward.png."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from lightrft.errors import TaskError

logger = logging.getLogger(__name__)

SIGNATURE = "# A run of lightrft train."
"""First line of every config.toml that is ours: by it a run is told from a directory that happens to look like one."""
OWN = ("config.toml", "metrics.jsonl", "transcripts.md", "reward.png", "tensorboard", "checkpoints")
"""All that a run makes, and all that ``overwrite`` deletes."""
PARTIAL = ".partial"
"""Ends the name of a file that is not whole yet."""


@frozen
class RunDirectory:
    """A directory that belongs to one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The run's settings, as TOML."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def transcripts(self) -> Path:
        """Questions and answers before and after, to read."""
        return self.path / "transcripts.md"

    @property
    def chart(self) -> Path:
        """Reward, accuracy and length against steps."""
        return self.path / "reward.png"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The strategy's ``save_dir``."""
        return self.path / "checkpoints"


def is_run(path: Path) -> bool:
    """Whether the directory holds a config.toml that we wrote."""
    try:
        with (path / "config.toml").open(encoding="utf-8", errors="replace") as file:
            return file.readline().startswith(SIGNATURE)
    except OSError:
        return False


def delete_run(path: Path) -> None:
    """Deletes what is ours and nothing else. A link is removed, never followed."""
    # The signature last: a deletion that is cut short leaves a directory that is still known as ours.
    for name in reversed(OWN):
        for target in (path / f"{name}{PARTIAL}", path / name):
            if target.is_symlink() or target.is_file():
                target.unlink()
            elif target.is_dir():
                shutil.rmtree(target)


def open_run(path: str | os.PathLike[str], *, resume: bool, overwrite: bool) -> RunDirectory:
    """The directory for a run, made if need be. For rank 0 alone.

    A directory with anything in it is refused, unless ``resume`` (then it must hold a run) or ``overwrite`` (then what
    that run left is deleted, and files that are not a run's are left alone). Raises ``TaskError``.
    """
    where = Path(path)
    if resume and overwrite:
        raise TaskError("--resume continues a run and --overwrite deletes it. Give one of them.")
    if where.exists() and not where.is_dir():
        raise TaskError(f"{str(where)!r} is a file. Give a directory for the run.")
    if resume and not is_run(where):
        what = "holds no run of lightrft" if where.exists() else "does not exist"
        raise TaskError(f"cannot resume: {str(where)!r} {what}. Check the path, or leave out --resume to start a run.")
    try:
        if where.exists() and any(where.iterdir()) and not resume:
            if not overwrite:
                raise TaskError(
                    f"{str(where)!r} is not empty. Use --resume to continue its run, --overwrite to delete its run and "
                    "start again, or another directory."
                )
            if not is_run(where):
                raise TaskError(
                    f"{str(where)!r} holds files that are no run of lightrft, and --overwrite deletes only runs. "
                    "Use another directory."
                )
            delete_run(where)
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TaskError(f"cannot use {str(where)!r} for the run: {error.strerror or error}.") from error
    return RunDirectory(where)


def replace_text(path: Path, text: str) -> None:
    """Writes a whole file or nothing."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_config(run: RunDirectory, toml: str) -> None:
    """Writes the settings, below the line by which the directory is known as a run."""
    replace_text(run.config, f"{SIGNATURE}\n{toml}")


# -- metrics ---------------------------------------------------------------------------------------------------------


def append_metrics(run: RunDirectory, step: int, metrics: Mapping[str, float]) -> None:
    """Appends one line. JSON has no NaN and no infinity: they become null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    with run.metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")


def metric_lines(run: RunDirectory) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Each whole line with its step and its values, null as NaN. A last line that a crash cut short is passed over.

    Raises ``TaskError`` naming any other bad line.
    """
    lines = run.metrics.read_text(encoding="utf-8").splitlines() if run.metrics.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            values = {str(k): float("nan") if v is None else float(v) for k, v in record.items()}
            step = int(values.pop("step"))
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            if number == len(lines):
                return
            raise TaskError(
                f"{run.metrics}, line {number}: no record of a step ({error}). Delete that line."
            ) from error
        yield line, step, values


def read_metrics(run: RunDirectory) -> list[tuple[int, dict[str, float]]]:
    """Steps and their values, in the order of the file."""
    return [(step, values) for _, step, values in metric_lines(run)]


def truncate_metrics(run: RunDirectory, step: int) -> None:
    """Drops what was recorded after ``step``: a run resumed there will record it again."""
    kept = [line + "\n" for line, at, _ in metric_lines(run) if at <= step]
    if run.metrics.exists():
        replace_text(run.metrics, "".join(kept))


@frozen
class Scalars:
    """A sink for numbers: TensorBoard's event files, or nothing."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def open_scalars(run: RunDirectory, resumed_step: int | None = None) -> Scalars:
    """TensorBoard event files of the run; without tensorboard, a warning and a sink that drops everything.

    ``resumed_step`` hides what an earlier part of the run recorded after that step.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        logger.warning("no TensorBoard files: %s. Install it with: pip install 'lightrft[train]'", error)
        return Scalars(lambda step, metrics: None, lambda: None)
    purge_step = None if resumed_step is None else resumed_step + 1
    writer = SummaryWriter(str(run.tensorboard), purge_step=purge_step)

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def close() -> None:
        writer.close()

    return Scalars(write, close)


# -- transcripts -----------------------------------------------------------------------------------------------------


@frozen
class Transcript:
    """One question as it was answered."""

    question: str
    expected: str
    answer: str
    reward: float


def labelled(label: str, text: str) -> str:
    """A labelled text as a Markdown code block's lines; its own line breaks stay in the block."""
    return f"    {label:<9} " + (text or "(nothing)").replace("\n", "\n" + " " * 14)


def section_start(title: str) -> str:
    """How a section begins. Everything quoted from a model is indented, so no answer can look like it."""
    return f"## {title}\n"


def write_transcripts(run: RunDirectory, title: str, transcripts: Iterable[Transcript]) -> None:
    """Writes the section ``title`` ("Before training") into transcripts.md, in place of an older one of that title."""
    rows = list(transcripts)
    text = run.transcripts.read_text(encoding="utf-8") if run.transcripts.exists() else "# Transcripts\n\n"
    head, *sections = ("\n" + text).split("\n## ")
    kept = [f"## {section}" for section in sections if not f"## {section}".startswith(section_start(title))]
    right = sum(row.reward >= 1.0 for row in rows)
    body = [section_start(title), f"{right} of {len(rows)} exactly right.", ""]
    for number, row in enumerate(rows, start=1):
        body += [f"{number}. reward {row.reward:.2f}", ""]
        body += [
            labelled("question", row.question),
            labelled("expected", row.expected),
            labelled("answer", row.answer),
            "",
        ]
    whole = [head.strip("\n"), *(section.strip("\n") for section in kept), "\n".join(body).strip("\n")]
    replace_text(run.transcripts, "\n\n".join(whole) + "\n")


# -- the chart -------------------------------------------------------------------------------------------------------

PANELS = (
    ("reward", "Mean reward", "#0072B2"),
    ("accuracy", "Held-out accuracy", "#009E73"),
    ("length", "Completion length (tokens)", "#D55E00"),
)
"""A metric, the label of its axis and its colour (Okabe and Ito's palette, safe for the colour-blind)."""


def series(rows: Sequence[tuple[int, Mapping[str, float]]], name: str) -> tuple[list[int], list[float]]:
    """Steps at which ``name`` was recorded as a finite number, and its values."""
    points = [(step, values[name]) for step, values in rows if math.isfinite(values.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and up to ``width - 1`` before it."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - width) : i + 1])]


def draw_chart(run: RunDirectory) -> None:
    """Draws reward.png from metrics.jsonl; without matplotlib, a warning and no picture."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ImportError as error:
        logger.warning("no reward.png: %s. Install it with: pip install 'lightrft[train]'", error)
        return
    rows = read_metrics(run)
    figure = Figure(figsize=(8, 9), dpi=120, layout="constrained")
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (name, label, colour) in zip(panels, PANELS, strict=True):
        steps, values = series(rows, name)
        width = max(1, len(values) // 10)
        if name == "accuracy":
            axes.plot(steps, values, color=colour, marker="o", markersize=6, linewidth=2)
            points = list(zip(steps, values, strict=True))
            for step, value in dict(points[:1] + points[-1:]).items():
                offset = (0, 9 if value < 0.9 else -18)
                axes.annotate(f"{value:.0%}", (step, value), offset, textcoords="offset points", ha="center")
            axes.set_ylim(-0.05, 1.05)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif width == 1:
            axes.plot(steps, values, color=colour, linewidth=2)
        else:
            axes.plot(steps, values, color=colour, linewidth=1, alpha=0.35)
            axes.plot(steps, moving_mean(values, width), color=colour, linewidth=2, label=f"mean of {width} steps")
            axes.legend(frameon=False, fontsize=9)
        if not steps:
            axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", color="grey")
        axes.set_ylabel(label, fontsize=11)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.03)
    panels[-1].set_xlabel("Step", fontsize=11)
    figure.align_ylabels()
    figure.suptitle(run.path.name or "run", fontsize=13)
    partial = run.chart.with_name(run.chart.name + PARTIAL)
    figure.savefig(partial, format="png")
    partial.replace(run.chart)
