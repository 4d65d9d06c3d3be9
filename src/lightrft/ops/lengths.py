"""How long completions are (R9): statistics over all ranks, and histograms for TensorBoard and as pictures."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from attrs import frozen

from lightrft.engines.protocol import Completion
from lightrft.errors import missing
from lightrft.strategy.protocol import AllGather

logger = logging.getLogger(__name__)


@frozen
class Lengths:
    """For each completion its number of output tokens, and whether ``max_new_tokens`` cut it short."""

    tokens: tuple[int, ...]
    truncated: tuple[bool, ...]

    def __attrs_post_init__(self) -> None:
        if len(self.tokens) != len(self.truncated):
            raise ValueError(f"{len(self.tokens)} lengths and {len(self.truncated)} flags: one of each is needed.")


@frozen
class LengthStatistics:
    """Lengths in tokens; all zero where ``count`` is. ``truncated_share`` is a part of 1."""

    count: int
    mean: float
    p50: float
    p80: float
    max: int
    truncated_share: float


def lengths_of(completions: Iterable[Completion]) -> Lengths:
    """The lengths of these completions, in their order."""
    ends = [(len(one.output_token_ids), one.finish_reason == "length") for one in completions]
    return Lengths(tuple(tokens for tokens, _ in ends), tuple(truncated for _, truncated in ends))


def merge(parts: Iterable[Lengths]) -> Lengths:
    """Several as one, in order. Percentiles of ranks cannot be averaged, so lengths travel and statistics come last."""
    held = list(parts)
    return Lengths(
        tuple(tokens for part in held for tokens in part.tokens),
        tuple(flag for part in held for flag in part.truncated),
    )


def gather_lengths(lengths: Lengths, all_gather: AllGather) -> Lengths:
    """Those of all ranks, in rank order; each may have another count, 0 included."""
    mine = torch.tensor([lengths.tokens, list(map(int, lengths.truncated))], dtype=torch.int64).reshape(2, -1).T
    return merge(
        Lengths(tuple(part[:, 0].tolist()), tuple(bool(flag) for flag in part[:, 1].tolist()))
        for part in all_gather(mine)
    )


def length_statistics(lengths: Lengths) -> LengthStatistics:
    """Percentiles are interpolated linearly between the two nearest lengths, as numpy does by default."""
    count = len(lengths.tokens)
    if not count:
        return LengthStatistics(0, 0.0, 0.0, 0.0, 0, 0.0)
    ordered = sorted(lengths.tokens)
    return LengthStatistics(
        count=count,
        mean=sum(ordered) / count,
        p50=percentile(ordered, 0.5),
        p80=percentile(ordered, 0.8),
        max=ordered[-1],
        truncated_share=sum(lengths.truncated) / count,
    )


def percentile(ordered: Sequence[int], share: float) -> float:
    """The value below which ``share`` of an ascending, non-empty sequence lies."""
    place = share * (len(ordered) - 1)
    below = ordered[math.floor(place)]
    return below + (ordered[math.ceil(place)] - below) * (place - math.floor(place))


def summary(statistics: LengthStatistics) -> str:
    """One line for a log."""
    if not statistics.count:
        return "lengths: no completions"
    return (
        f"lengths of {statistics.count} completions: mean {statistics.mean:.1f}, p50 {statistics.p50:.0f}, "
        f"p80 {statistics.p80:.0f}, max {statistics.max}, cut short {statistics.truncated_share:.0%}"
    )


def should_plot(step: int, plot_every: int) -> bool:
    """Whether this step is one of every ``plot_every``; 0 or less: never."""
    return plot_every > 0 and step % plot_every == 0


def report_lengths(lengths: Lengths, log_dir: str | Path | None, step: int) -> None:
    """Logs the statistics, and writes the histogram where there is a directory for it."""
    logger.info("rollout %d: %s", step, summary(length_statistics(lengths)))
    if log_dir is not None:
        write_histogram(lengths, log_dir, step)


def write_histogram(lengths: Lengths, log_dir: str | Path, step: int) -> Path | None:
    """Writes the lengths as a TensorBoard histogram and as ``lengths/step<step>.png`` under ``log_dir``.

    Returns the picture's path; None, with nothing written, when there are no completions.
    """
    if not lengths.tokens:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing("tensorboard", "train", "the histogram of lengths") from error
    picture = Path(log_dir) / "lengths" / f"step{step:06d}.png"
    draw_histogram(lengths, picture, step)
    writer = SummaryWriter(str(log_dir))
    writer.add_histogram("rollout/output_length", torch.tensor(lengths.tokens), step)
    writer.close()
    return picture


def draw_histogram(lengths: Lengths, picture: Path, step: int) -> None:
    """The picture, drawn without a display and without pyplot's global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("matplotlib", "train", "the picture of lengths") from error
    figure = Figure(figsize=(6.0, 3.5), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    whole = [tokens for tokens, cut in zip(lengths.tokens, lengths.truncated, strict=True) if not cut]
    cut_short = [tokens for tokens, cut in zip(lengths.tokens, lengths.truncated, strict=True) if cut]
    axes.hist([whole, cut_short], bins=min(50, max(lengths.tokens) + 1), stacked=True, label=["ended", "cut short"])
    axes.set(xlabel="output tokens", ylabel="completions", title=f"step {step}: {summary(length_statistics(lengths))}")
    axes.title.set_fontsize("small")
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100)
