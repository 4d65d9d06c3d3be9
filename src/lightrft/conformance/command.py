"""``lightrft conformance``: any backends and engines against all laws."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import frozen
from tyro.conf import Positional

from lightrft.conformance.building import load_build
from lightrft.conformance.engine_run import COMPUTES_NOTHING, check_engine_laws
from lightrft.conformance.engines import ENGINE_LAWS, EngineLaw
from lightrft.conformance.law import CAPABILITIES, Capability, Law, Target, slug
from lightrft.conformance.laws import LAWS
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.conformance.report import LEGEND, Report, as_table, failures, format_of, write
from lightrft.conformance.run import (
    ANY_ORDER,
    BESIDE_THE_LAWS,
    GOOD,
    LACKING,
    PROFILES,
    BackendReport,
    Plan,
    Result,
    check_target,
    read_xfails,
    reference_of,
    refuse_unknown_xfails,
)
from lightrft.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

OK, BROKEN = 0, 1
OF_ONE_PROCESS = ("fake", "local")
ZERO_STAGES = range(4)


@frozen(kw_only=True)
class ConformanceOptions:
    """Check every law on backends and engines, those of lightrft or your own. Exit code 1 if one is broken.

    A backend runs in processes of its own, one for each rank, and is given by its name (deepspeed stands for all ZeRO stages,
    deepspeed-3 for one) or as package.module:build.
    """

    backends: Positional[tuple[str, ...]] = ()
    """fake, local, fsdp, deepspeed, the name of an installed backend, or package.module:build."""
    world: tuple[int, ...] = (1,)
    """Numbers of ranks. fake and local are one process whatever is said here."""
    engines: tuple[str, ...] = ()
    """Engines: hf, hf-copy, scripted, vllm, sglang, or package.module:function, which is given the directory of a model and a
    tokenizer and gives an engine."""
    profile: Literal["quick", "ci", "nightly"] = "quick"
    """How many examples of each law are tried."""
    laws: str = ""
    """Only laws whose name has this in it."""
    against: str | None = None
    """Also run programs of operations on this backend, in one process, and compare all that can be seen."""
    seed: int | None = None
    """Tries the same examples as a run that printed this seed."""
    xfails: Path | None = None
    """A file of laws that are known to be broken: the beginning of a law's name, two spaces, # and the reason, one a line."""
    without: tuple[Capability, ...] = ()
    """What your backends do not have: laws about it are skipped."""
    report: tuple[Path, ...] = ()
    """Files for the report; the ending says the format: .html, .md or .json."""
    database: Path = Path(".lightrft/conformance")
    """A directory that keeps what failed, to be tried first the next time; and what the ranks wrote."""
    list: bool = False
    """Show the laws, and check nothing."""
    debug: bool = False
    """Show tracebacks and what the ranks write."""


def conformance(options: ConformanceOptions, console: Console) -> int:
    """Checks, shows the matrix, writes the reports; the exit code."""
    laws = [law for law in LAWS if options.laws in law.name]
    if options.list:
        names = [law.name for law in LAWS] + [law.name for law in ENGINE_LAWS]
        for name in names:
            if options.laws in name:
                console.print(name, markup=False, highlight=False, soft_wrap=True)
        return OK
    for file in options.report:
        format_of(file)
    if not options.backends and not options.engines:
        raise ConfigError("nothing to check. Name backends, such as: lightrft conformance fake local fsdp --world 1 2")
    engine_laws = [law for law in ENGINE_LAWS if options.laws in law.name]
    if not (laws if options.backends else engine_laws):
        raise ConfigError(f"no law has {options.laws!r} in its name. `lightrft conformance --list` shows them all.")
    report = looked_at(options, laws, engine_laws, console)
    for matrix in report.matrices:
        console.print(as_table(matrix))
    console.print(LEGEND, highlight=False)
    if not report.is_good:
        console.print(failures(report), markup=False, highlight=False, soft_wrap=True)
    for file in options.report:
        write(report, file)
        console.print(f"wrote {file}", markup=False, highlight=False)
    console.print(report.summary, markup=False, highlight=False)
    return OK if report.is_good else BROKEN


def looked_at(
    options: ConformanceOptions, laws: Sequence[Law], engine_laws: Sequence[EngineLaw], console: Console
) -> Report:
    """The report, with a bar on the terminal meanwhile."""
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    targets = [target for name in options.backends for target in targets_of(name, options)]
    xfails = {} if options.xfails is None else read_xfails(options.xfails)
    of_backends, of_engines = xfails_of(xfails, laws, engine_laws)
    reference = None if options.against is None else reference_of(options.against)
    any_order = options.laws in ANY_ORDER
    total = len(targets) * (len(laws) + 2 + any_order + (reference is not None)) + len(options.engines) * len(
        engine_laws
    )
    start = time.monotonic()
    with progress(console, total) as advance, ExitStack() as pools:
        plan = Plan(
            profile=PROFILES[options.profile], xfails=of_backends, seed=seed, database=options.database, laws=laws,
            any_order=any_order, against=reference, advance=lambda result: advance("", result),
        )  # fmt: skip
        opened: dict[tuple[str, int], RankPool] = {}

        def ranks_of(target: Target) -> RankPool:
            # Each library beneath has ranks of its own: it may leave something behind in a process.
            key = (target.name.partition("-")[0], target.world_size)
            if key not in opened:
                opened[key] = pools.enter_context(pool_of(options, target))
            return opened[key]

        columns: list[BackendReport] = []
        for target in targets:
            advance(f"{target.name}, W = {target.world_size}", None)
            others = None if reference is None else ranks_of(reference)
            columns.append(check_target(target, plan, ranks_of(target), others))
        for name in options.engines:
            advance(name, None)
            computes = name not in COMPUTES_NOTHING
            columns.append(
                check_engine_laws(name, computes=computes, laws=engine_laws, xfails=of_engines, advance=plan.advance)
            )
    return Report(columns=columns, profile=options.profile, seed=seed, seconds=time.monotonic() - start)


def xfails_of(
    xfails: Mapping[str, str], laws: Sequence[Law], engine_laws: Sequence[EngineLaw]
) -> tuple[dict[str, str], dict[str, str]]:
    """The entries about backends and those about engines, of the laws that are looked at. Raises for those about neither."""
    refuse_unknown_xfails(xfails, [*BESIDE_THE_LAWS, *(law.name for law in LAWS), *(law.name for law in ENGINE_LAWS)])

    def about(names: Sequence[str]) -> dict[str, str]:
        return {prefix: why for prefix, why in xfails.items() if any(name.startswith(prefix) for name in names)}

    return about([*BESIDE_THE_LAWS, *(law.name for law in laws)]), about([law.name for law in engine_laws])


def pool_of(options: ConformanceOptions, target: Target) -> RankPool:
    """The ranks of a target. What they write goes to a file, so that the matrix can be read."""
    output = None
    if not options.debug:
        options.database.mkdir(parents=True, exist_ok=True)
        name = slug(target.name.partition("-")[0])
        output = options.database / f"{name}-W{target.world_size}.log"
        output.unlink(missing_ok=True)
    return rank_pool(target.world_size, timeout=PROFILES[options.profile].timeout, output=output)


def targets_of(name: str, options: ConformanceOptions) -> list[Target]:
    """What a word of the command line stands for, on each number of ranks. Raises ``ConfigError``."""
    profile = PROFILES[options.profile]
    base, _, stage = name.partition("-") if name.startswith("deepspeed-") else (name, "", "")
    if stage and stage not in map(str, ZERO_STAGES):
        raise ConfigError(f"backend={name!r} is not known: stages are deepspeed-0 to deepspeed-3.")
    build = load_build(base)
    kinds: dict[str, dict[str, object]] = {name: {}}
    if base == "deepspeed":
        kinds = {f"deepspeed-{each}": {"zero_stage": each} for each in ([int(stage)] if stage else ZERO_STAGES)}
    return [
        Target(
            name=kind,
            build=build,
            world_size=world_size,
            fields=fields,
            capabilities=CAPABILITIES - LACKING.get(base, frozenset()) - frozenset(options.without),
            examples=profile.examples_of(world_size),
        )
        for kind, fields in kinds.items()
        for world_size in ((1,) if base in OF_ONE_PROCESS else options.world)
    ]


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str, Result | None], None]]:
    """A bar that says on what, where it is and what was broken so far."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total)

        def advance(what: str, result: Result | None) -> None:
            if result is None:
                bar.update(task, description=what)
                return
            bar.advance(task)
            if result.outcome not in GOOD:
                bar.console.print(f"{result.outcome.value}: {result.law}", markup=False, highlight=False)

        yield advance
