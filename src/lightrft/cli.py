"""``lightrft demo | train | doctor``: the only file that prints.

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

from lightrft.errors import USER_ERRORS, ConfigError

if TYPE_CHECKING:
    from lightrft.rlvr.config import TrainConfig
    from lightrft.rlvr.session import Outcome

OK, MISTAKE, INTERRUPTED = 0, 2, 130
LAUNCHED = ("deepspeed", "fsdp")
"""Backends whose ranks are processes that a launcher starts."""

USAGE = """usage: lightrft COMMAND [options]

  demo      train a real language model on a real task, in minutes
  train     train your model on your task, with any setting
  doctor    what this machine can run, and how to get what is missing

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

    return parse_flags(cls, words, default=default, prog=prog, prefixes=False)


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


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = MappingProxyType(
    {"demo": demo, "train": train, "doctor": doctor}
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
    """The exit code of a command: 0, 2 for a user's mistake, 130 when interrupted."""
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
