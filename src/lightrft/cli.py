"""``lightrft demo | train | checkpoints | export | conformance | check | doctor``: the only file that prints.

A user's mistake is a message on stderr and exit code 2 (``--debug`` shows the traceback); Ctrl-C saves and gives 130.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeVar

from attrs import evolve, frozen

from lightrft.errors import USER_ERRORS, CheckpointError, ConfigError, missing

if TYPE_CHECKING:
    from torch.nn import Module

    from lightrft.checkpoints.export import Tokenizer
    from lightrft.checkpoints.report import Entry, Report
    from lightrft.rlvr.config import TrainConfig
    from lightrft.rlvr.session import Outcome

OK, DAMAGED, MISTAKE, INTERRUPTED = 0, 1, 2, 130
LAUNCHED = ("deepspeed", "fsdp")
"""Backends whose ranks are processes that a launcher starts."""

USAGE = """usage: lightrft COMMAND [options]

  demo         train a real language model on a real task, in minutes
  train        train your model on your task, with any setting
  checkpoints  what is in a directory of checkpoints, whole or damaged
  export       turn a checkpoint into a Hugging Face directory
  conformance  prove that a backend or an engine keeps the laws, yours too
  check        type-check your trainer against the Strategy
  doctor       what this machine can run, and how to get what is missing

`lightrft COMMAND --help` lists the options of a command."""

T = TypeVar("T")


@frozen(kw_only=True)
class DemoOptions:
    """Train a language model with GRPO until it answers with the bare number; see how it answered before and after."""

    model: Literal["smollm2", "tiny"] = "smollm2"
    """smollm2: a real pretrained model, some minutes. tiny: a random small model on a toy task, under a minute."""
    output: str | None = None
    """The run's directory; by default runs/demo, or runs/demo-tiny."""
    steps: int | None = None
    """Steps, if other than the demo's own."""
    seed: int = 42
    """Seed of everything random."""
    resume: bool = False
    """Go on with the run in the directory."""
    overwrite: bool = False
    """Delete the run in the directory and start again."""
    quiet: bool = False
    """Only the first and the last lines."""
    debug: bool = False
    """Show tracebacks and debug logs."""


def parse(cls: type[T], words: Sequence[str], prog: str, default: T | None = None) -> T:
    """The options; a word that cannot be used exits with code 2."""
    from lightrft.strategy.flags import parse_flags

    return parse_flags(cls, words, default=default, prog=prog, prefixes=False, positional=True)


def demo(words: Sequence[str]) -> int:
    """``lightrft demo``."""
    from lightrft.rlvr.demo import DEMOS

    options = parse(DemoOptions, words, "lightrft demo")
    config = DEMOS[options.model]
    config = evolve(
        config,
        output=options.output or config.output,
        steps=options.steps or config.steps,
        strategy=evolve(config.strategy, seed=options.seed),
    )
    return train_and_report(config, options.resume, options.overwrite, options.quiet)


def train(words: Sequence[str]) -> int:
    """``lightrft train``."""
    from lightrft.rlvr.config import TrainConfig, TrainOptions

    file = settings_file(words)
    start = TrainOptions() if file is None else TrainOptions(settings=read_settings(file, TrainConfig))
    options = parse(TrainOptions, words, "lightrft train", start)
    require_launcher(options.settings, words)
    return train_and_report(options.settings, options.resume, options.overwrite, options.quiet, options.trace)


def require_launcher(config: TrainConfig, words: Sequence[str]) -> None:
    """Says what to type where a backend of several ranks is started by nobody."""
    from lightrft.ops.world import discover
    from lightrft.strategy.strategy import chosen_backend

    backend = chosen_backend(config.strategy)
    if backend in LAUNCHED and discover().address is None:
        raise ConfigError(
            f"backend {backend!r} runs in processes that a launcher starts, and none did. Type:\n\n"
            f"  torchrun --nproc-per-node 2 -m lightrft train {shlex.join(words)}\n\n"
            f"with the number of GPUs of this machine in place of 2; or choose --backend local for one process."
        )


def settings_file(words: Sequence[str]) -> Path | None:
    """The file whose settings the flags override: ``--config``, or with ``--resume`` that of the run itself."""
    named = value_of(words, "--config")
    if named is not None:
        return Path(named)
    output = value_of(words, "--output")
    run = Path(output) / "config.toml" if output is not None else None
    return run if "--resume" in words and run is not None and run.exists() else None


def value_of(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag, before the real parser has run."""
    for position, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and position + 1 < len(words):
            return words[position + 1]
    return None


def read_settings(file: Path, cls: type[T]) -> T:
    """An attrs class out of a file. One error lists every bad value."""
    from lightrft.strategy.flags import load_config_file
    from lightrft.strategy.structuring import structure

    return structure(cls, load_config_file(file))


def train_and_report(config: TrainConfig, resume: bool, overwrite: bool, quiet: bool, trace: Path | None = None) -> int:
    """Runs, and says how it went."""
    from lightrft.rlvr.session import run

    outcome = run(config, resume=resume, overwrite=overwrite, quiet=quiet, trace=trace, announce=print)
    if outcome.rank == 0:
        print(summary(outcome))
    return INTERRUPTED if outcome.stopped else OK


def summary(outcome: Outcome) -> str:
    """The last lines of a run: how well it answers, where everything is, what to do next."""
    lines = []
    if outcome.before is not None and outcome.after is not None:
        gained = 100 * (outcome.after - outcome.before)
        lines.append(
            f"held-out accuracy: {outcome.before:.1%} before, {outcome.after:.1%} after ({gained:+.1f} points)"
        )
    elif outcome.after is not None:
        lines.append(f"held-out accuracy: {outcome.after:.1%}")
    lines += [f"  {name:<12} {outcome.directory / file}" for name, file in LEFT_BEHIND.items()]
    if outcome.stopped:
        lines.append(f"stopped after step {outcome.steps}. Go on: lightrft train --resume --output {outcome.directory}")
    return "\n".join(lines)


LEFT_BEHIND: Mapping[str, str] = MappingProxyType(
    {
        "chart": "reward.png",
        "transcripts": "transcripts.md",
        "metrics": "metrics.jsonl",
        "settings": "config.toml",
        "checkpoints": "checkpoints",
    }
)
"""What a run leaves in its directory."""


@frozen(kw_only=True)
class CheckpointsOptions:
    """Show the checkpoints in a directory: which are whole, which are damaged and why. Exit code 1 if one is damaged."""

    directory: Path
    """A directory of checkpoints, or of a run of `lightrft train`."""
    verify: bool = False
    """Read every file and compare checksums; without it only sizes are compared."""
    prune: int | None = None
    """Remove all but so many of the most recently committed checkpoints; the latest one always stays."""
    dry_run: bool = False
    """With --prune: say what would be removed, and remove nothing."""
    debug: bool = False
    """Show tracebacks and debug logs."""


def checkpoints(words: Sequence[str]) -> int:
    """``lightrft checkpoints``."""
    from lightrft.checkpoints.report import no_run_saves_into

    options = parse(CheckpointsOptions, words, "lightrft checkpoints")
    if options.dry_run and options.prune is None:
        raise ConfigError("--dry-run says what --prune would remove. Add --prune N.")
    if options.prune is None or options.dry_run:
        report = examined(options)
    else:
        with no_run_saves_into(options.directory):
            report = examined(options)
    show_report(report, options.verify)
    return OK if report.is_whole else DAMAGED


def examined(options: CheckpointsOptions) -> Report:
    """The report, after what is superfluous was removed."""
    from lightrft.checkpoints.report import examine, remove, superfluous

    report = verified(options.directory) if options.verify else examine(options.directory)
    for entry in () if options.prune is None else superfluous(report, options.prune):
        if not options.dry_run:
            report = remove(report, entry)
        size = "" if entry.manifest is None else f", {size_text(entry.manifest.size)}"
        print(f"{'would remove' if options.dry_run else 'removed'} {entry.path}{size}")
    return report


def verified(directory: Path) -> Report:
    """The report after every byte was read, with a bar on the terminal meanwhile."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from lightrft.checkpoints.report import bytes_in, examine

    console = Console(stderr=True)
    columns = ("reading", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=bytes_in(directory))
        return examine(directory, verify=True, advance=lambda size: progress.advance(task, size))


def show_report(report: Report, verified: bool) -> None:
    """The table, and beneath it what is wrong and what else lies there."""
    from rich.console import Console
    from rich.table import Table

    table = Table("tag", "state", "step", "backend", "W", "size", "saved (UTC)")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for entry in report.entries:
        table.add_row(*report_row(entry))
    console = Console()
    console.print(f"{report.directory}", markup=False, highlight=False, soft_wrap=True)
    if report.entries:
        console.print(table)
    problems = [problem for entry in report.entries for problem in entry.problems]
    problems += [report.problem] if report.problem else []
    lines = ["Damaged:", *(f"  {problem}" for problem in problems)] if problems else []
    if report.unfinished:
        lines.append(f"saves in progress, or left by dead ones until the next save: {', '.join(report.unfinished)}")
    if report.foreign:
        lines.append(f"not ours, never touched: {', '.join(report.foreign)}")
    if not verified and report.is_whole:
        lines.append("Sizes were compared, not checksums: --verify reads every file.")
    if lines:
        console.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)


def report_row(entry: Entry) -> tuple[str, ...]:
    """The cells of a checkpoint."""
    from rich.markup import escape

    name = entry.path.name if entry.manifest is None or entry.is_copy else entry.manifest.tag
    mark = " (latest)" if entry.is_latest else " (a copy)" if entry.is_copy else ""
    state = "[red]damaged" if entry.problems else "[green]whole"
    manifest = entry.manifest
    if manifest is None:
        return escape(name) + mark, state, "", "", "", "", ""
    return (
        escape(name) + mark,
        state,
        str(manifest.step),
        escape(manifest.backend),
        str(manifest.world_size),
        size_text(manifest.size),
        escape(manifest.saved_on[:16].replace("T", " ")),
    )


def size_text(size: int) -> str:
    """Bytes, for people."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


@frozen(kw_only=True)
class ExportOptions:
    """Turn a checkpoint into a Hugging Face directory, without a GPU."""

    checkpoint: Path
    """A checkpoint's directory, one that holds several (its latest is taken), that of a run of `lightrft train`, or
    one that DeepSpeed itself saved."""
    out: Path
    """Where the model goes."""
    model: str | None = None
    """Where architecture and tokenizer come from: tiny, smollm2, or a Hugging Face directory or name; of a run, its own
    by default. For an adapter: the directory that has its adapter_config.json."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the weights are stored as."""
    merge: bool = False
    """Add the weights of a LoRA adapter to those that it adapts."""
    overwrite: bool = False
    """Replace the model in a directory that is not empty."""
    debug: bool = False
    """Show tracebacks and debug logs."""


def export(words: Sequence[str]) -> int:
    """``lightrft export``."""
    from lightrft.checkpoints.export import export_checkpoint

    options = parse(ExportOptions, words, "lightrft export")
    if not options.checkpoint.is_dir():
        raise CheckpointError(f"no checkpoint in {options.checkpoint}: there is no such directory. Check the path.")
    done = export_checkpoint(
        options.checkpoint,
        options.out,
        model=options.model or model_of_run(options.checkpoint),
        load_base=base_model,
        dtype=options.dtype,
        merge=options.merge,
        overwrite=options.overwrite,
    )
    what = {
        "model": f"a model of {done.parameters:,} parameters in {options.dtype}",
        "adapter": f"a LoRA adapter of {done.parameters:,} parameters in {options.dtype}",
        "weights": "model.safetensors alone, since no architecture is known: name one with --model",
    }
    print(f"{done.source} -> {done.directory}: {what[done.kind]}.")
    return OK


def model_of_run(checkpoint: Path) -> str | None:
    """The model that the run to which a checkpoint belongs started from; None if it is no run's."""
    from lightrft.rlvr.config import TrainConfig
    from lightrft.rlvr.run_directory import is_run

    here = checkpoint.resolve()
    for directory in (here, here.parent, here.parent.parent):
        if is_run(directory):
            return read_settings(directory / "config.toml", TrainConfig).model
    return None


def base_model(spec: str) -> tuple[Module, Tokenizer]:
    """Architecture and tokenizer. The weights are replaced: of a directory they are not even read."""
    from lightrft.checkpoints.export import skeleton
    from lightrft.rlvr.models import load_policy

    return skeleton(spec) if Path(spec).is_dir() else load_policy(spec)


def doctor(words: Sequence[str]) -> int:
    """``lightrft doctor``."""
    from rich.console import Console
    from rich.table import Table

    from lightrft.doctor import examine

    parse(DoctorOptions, words, "lightrft doctor")
    findings = examine()
    table = Table("", "", "usable", "found")
    for finding in findings:
        table.add_row(finding.kind, finding.name, "[green]yes" if finding.usable else "[yellow]no", finding.detail)
    console = Console()
    console.print(table)
    # Apart from the table, whose cells would cut a line to type in two.
    remedies = [f"  {f.kind} {f.name}: {f.remedy}" for f in findings if f.remedy]
    if remedies:
        console.print("To get what is missing:", *remedies, sep="\n", markup=False, highlight=False, soft_wrap=True)
    return OK


@frozen
class DoctorOptions:
    """Show which backends and engines this machine can run, versions, devices, and how to get what is missing."""


def conformance(words: Sequence[str]) -> int:
    """``lightrft conformance``."""
    from importlib.util import find_spec

    from rich.console import Console

    if find_spec("hypothesis") is None:
        raise missing("hypothesis", "conformance", "lightrft conformance")
    from lightrft.conformance import command

    return command.conformance(parse(command.ConformanceOptions, words, "lightrft conformance"), Console())


@frozen(kw_only=True)
class CheckOptions:
    """Type-check your trainer: what mypy finds that is about lightrft, and operations that not all ranks reach. Exit code 1 if
    there is any."""

    paths: tuple[str, ...]
    """Files, directories or packages that can be imported; nothing of them is run."""
    debug: bool = False
    """Show tracebacks and debug logs."""


def check(words: Sequence[str]) -> int:
    """``lightrft check``."""
    from lightrft.typecheck import check_files

    report = check_files(parse(CheckOptions, words, "lightrft check").paths)
    print(report)
    return report.exit_code


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = MappingProxyType(
    {
        "demo": demo,
        "train": train,
        "checkpoints": checkpoints,
        "export": export,
        "conformance": conformance,
        "check": check,
        "doctor": doctor,
    }
)


def set_up_log(debug: bool) -> None:
    """One log for all ranks: that of rank 0, and what the others warn of."""
    from lightrft.ops.world import discover

    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format=f"%(levelname)s{rank_label()}: %(message)s"
    )
    if discover().rank == 0 or debug:
        logging.getLogger("lightrft").setLevel(logging.DEBUG if debug else logging.INFO)


def rank_label() -> str:
    """Which rank speaks, where there are several."""
    from lightrft.ops.world import discover

    try:
        world = discover()
    except ConfigError:
        return ""
    return f" (rank {world.rank})" if world.world_size > 1 else ""


def main(words: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code."""
    sys.exit(run_command(sys.argv[1:] if words is None else words))


def run_command(words: Sequence[str]) -> int:
    """The exit code of a command: 0, 1 for a damaged checkpoint, 2 for a user's mistake, 130 when interrupted."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return OK if words else MISTAKE
    if words[0] == "--version":
        from lightrft import __version__

        print(f"lightrft {__version__}")
        return OK
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"lightrft: there is no command {words[0]!r}.\n\n{USAGE}", file=sys.stderr)
        return MISTAKE
    debug = "--debug" in words
    try:
        set_up_log(debug)
        return command(words[1:])
    except USER_ERRORS as error:
        if debug:
            raise
        print(f"lightrft{rank_label()}: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("lightrft: interrupted.", file=sys.stderr)
        return INTERRUPTED
