"""``check_backend``: every law on one backend, and what came of each.

    from lightrft.conformance.run import check_backend
    from mypackage import build

    def test_my_backend() -> None:
        check_backend(build, world_size=2).raise_failures()

A backend runs in processes of its own, one for each rank: what hangs, crashes or exits there is a result like others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from attrs import field, frozen

from lightrft.conformance.building import Built, examine_build, load_build
from lightrft.conformance.differential import search_against
from lightrft.conformance.law import CAPABILITIES, Broken, Capability, Law, Target, applies, search, slug
from lightrft.conformance.laws import LAWS
from lightrft.conformance.pool import RankFailure, RankPool, rank_pool
from lightrft.conformance.rank import START_S
from lightrft.conformance.reproduction import law_as_test, program_as_test
from lightrft.conformance.source import name_of
from lightrft.conformance.stateful import search_stateful
from lightrft.errors import ConfigError, listed
from lightrft.strategy.protocol import BuildStrategy

BUILDS = "S1: build gives a Strategy"
BEHAVES = "S4: building is quiet, leaves nothing behind and changes nothing that it was given"
"""What is looked at before the laws."""
ANY_ORDER = "S5: any operations in any order come out as their model says"
AGREES = "S6: any program ends as on the backend that it is compared with"
"""What is looked at after them."""
BESIDE_THE_LAWS = (BUILDS, BEHAVES, ANY_ORDER, AGREES)
MAX_HUNG = 3
"""So many laws may hang on a backend before the rest is left out: each takes a whole timeout."""


@frozen
class Profile:
    """How thoroughly is looked."""

    examples: int
    """For a law that draws values, on one rank."""
    examples_on_ranks: int
    """The same on several."""
    timeout: float = 120.0
    """Seconds for an example, the first of which imports what it needs; then a rank counts as hung."""

    def examples_of(self, world_size: int) -> int:
        """How many."""
        return self.examples if world_size == 1 else self.examples_on_ranks


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {"quick": Profile(10, 3), "ci": Profile(25, 10), "nightly": Profile(300, 60)}
)


LACKING: Mapping[str, frozenset[Capability]] = MappingProxyType({"fake": frozenset({"bf16", "engine"})})
"""What those that we ship are without, by the laws F1 and F2."""


class Outcome(Enum):
    """What came of a law."""

    PASSED = "passed"
    FAILED = "failed"
    HUNG = "hung"
    SKIPPED = "skipped"
    EXPECTED = "failed as expected"
    UNEXPECTED = "passed though expected to fail"


GOOD = (Outcome.PASSED, Outcome.SKIPPED, Outcome.EXPECTED)


@frozen(kw_only=True)
class Result:
    """One law on one backend."""

    law: str
    outcome: Outcome
    seconds: float = 0.0
    why: str = ""
    """The error and all ranks' tracebacks or stacks; the capability that is not there; the reason of the xfail."""
    reproduction: str = ""
    """A Python test that fails in the same way, on the smallest values found."""


@frozen(kw_only=True)
class BackendReport:
    """All laws on one backend."""

    name: str
    world_size: int | None
    """None: an engine."""
    results: Sequence[Result]

    @property
    def is_good(self) -> bool:
        """Nothing failed that was not expected to, and nothing passed that was."""
        return all(result.outcome in GOOD for result in self.results)

    @property
    def title(self) -> str:
        """Name and number of ranks, in few characters."""
        return self.name if self.world_size is None else f"{self.name} W{self.world_size}"

    def raise_failures(self) -> None:
        """Raises ``AssertionError`` with every law that does not hold, and how to see it again."""
        bad = [result for result in self.results if result.outcome not in GOOD]
        if bad:
            told = (f"{result.law}: {result.outcome.value}\n{result.why}\n{result.reproduction}" for result in bad)
            raise AssertionError(f"{self.title}: {len(bad)} of {len(self.results)} laws:\n\n" + "\n\n".join(told))


def ignore(result: Result) -> None:
    """Nobody looks at results as they come."""


@frozen(kw_only=True)
class Plan:
    """How a backend is looked at."""

    profile: Profile = PROFILES["quick"]
    xfails: Mapping[str, str] = field(factory=dict)
    """Beginnings of the names of laws that are known not to hold, each with the reason."""
    seed: int | None = None
    database: Path | None = None
    laws: Sequence[Law] = LAWS
    any_order: bool = True
    """Whether operations are tried in any order too."""
    against: Target | None = None
    """A backend that the same programs are run on."""
    advance: Callable[[Result], None] = ignore


def check_backend(
    build: BuildStrategy | str,
    *,
    name: str | None = None,
    world_size: int = 1,
    fields: Mapping[str, object] | None = None,
    capabilities: Collection[Capability] = CAPABILITIES,
    xfails: Mapping[str, str] | Path | None = None,
    profile: str = "quick",
    seed: int | None = None,
    database: Path | None = None,
    laws: Sequence[Law] = LAWS,
    any_order: bool = True,
    against: BuildStrategy | str | None = None,
    advance: Callable[[Result], None] = ignore,
) -> BackendReport:
    """Checks every law on a backend, ``world_size`` ranks in processes of their own.

    ``build`` stands at the top of a module, or is its name, ``"package.module:build"``. ``fields`` are those of the
    configuration that it is built with. ``capabilities``: what it has beside training: laws about others are skipped.
    ``xfails``: beginnings of the names of laws that are known not to hold, each with the reason, or a file of them; one
    that holds after all counts as a failure. ``profile``: quick, ci or nightly. ``seed`` repeats a run; ``database`` keeps
    what failed. ``any_order`` also tries programs of operations in any order, and ``against`` runs such programs on
    another backend, of one rank, which must see the same.

    Raises ``ConfigError`` for what cannot be looked at: no such build function, profile, capability or law.
    """
    if profile not in PROFILES:
        raise ConfigError(f"profile={profile!r} is not known. Known are {', '.join(PROFILES)}.")
    if unknown := sorted(set(capabilities) - CAPABILITIES):
        raise ConfigError(f"capabilities has {unknown}. There are {', '.join(sorted(CAPABILITIES))}.")
    function = load_build(build) if isinstance(build, str) else build
    chosen = PROFILES[profile]
    target = Target(
        name=name or name_of(function),
        build=function,
        world_size=world_size,
        fields=fields or {},
        capabilities=frozenset(capabilities),
        examples=chosen.examples_of(world_size),
    )
    reference = None if against is None else reference_of(against)
    known = read_xfails(xfails) if isinstance(xfails, Path) else xfails or {}
    plan = Plan(
        profile=chosen,
        xfails=known,
        seed=seed,
        database=database,
        laws=laws,
        any_order=any_order,
        against=reference,
        advance=advance,
    )
    return check_target(target, plan)


def check_target(
    target: Target, plan: Plan, pool: RankPool | None = None, reference_pool: RankPool | None = None
) -> BackendReport:
    """Every law of the plan on a target, in ``pool`` or in one of its own; so the backend that it is compared with."""
    refuse_unknown_xfails(plan.xfails, [*BESIDE_THE_LAWS, *(law.name for law in plan.laws)])
    with opened(target, plan, pool) as ranks:
        results = examined(target, plan, ranks)
        is_strategy = results[0].outcome is Outcome.PASSED
        hung = 0
        for name, look in looks(target, plan, ranks, reference_pool):
            if not is_strategy:
                result = skipped(name, "not run: build gives no Strategy")
            elif hung >= MAX_HUNG:
                result = skipped(name, f"not run: {hung} laws hung before")
            else:
                result = look()
            hung += result.outcome is Outcome.HUNG
            results.append(result)
            plan.advance(result)
    return BackendReport(name=target.name, world_size=target.world_size, results=results)


def opened(target: Target, plan: Plan, pool: RankPool | None) -> AbstractContextManager[RankPool]:
    """The ranks of a target: those that are there already, or its own as long as they are needed."""
    return rank_pool(target.world_size, timeout=plan.profile.timeout) if pool is None else nullcontext(pool)


def read_xfails(file: Path) -> dict[str, str]:
    """The beginnings of the names of laws, and why they are known to be broken. Raises ``ConfigError``."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the xfail file {file} cannot be read: {error.strerror}. Check the path.") from error
    found: dict[str, str] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        text, _, reason = line.partition("#")
        if not text.strip():
            continue
        if not reason.strip():
            problems.append(f"line {number}: {text.strip()!r} has no reason: add one behind a #")
        found[text.strip()] = reason.strip()
    if problems:
        raise ConfigError(f"{file} cannot be used:{listed(problems)}")
    return found


def refuse_unknown_xfails(xfails: Mapping[str, str], names: Sequence[str]) -> None:
    """An entry that no law's name begins with would excuse nothing, and nobody would see it."""
    if stale := [prefix for prefix in xfails if not any(name.startswith(prefix) for name in names)]:
        raise ConfigError(f"no law begins with what these xfail entries say:{listed(stale)}\nRemove or correct them.")


def examined(target: Target, plan: Plan, pool: RankPool) -> list[Result]:
    """What is looked at before the laws."""
    start = time.monotonic()
    built: list[Built] = []
    failure: Exception | None = None
    try:
        # What it takes to import everything does not count as time in which a rank hangs.
        pool.run_within(START_S, ready, target.build, [law.body for law in plan.laws])
        built = pool.run(examine_build, target.build, target.fields)
    except TypeError as error:  # what cannot be sent to a rank is the caller's to mend
        if "a rank pool cannot send" in str(error):
            raise ConfigError(str(error)) from error
        failure = error
    except Exception as error:
        failure = error
    seconds = time.monotonic() - start
    if failure is not None:
        results = [
            judged(plan.xfails, BUILDS, seconds, Broken({}, failure), ""),
            skipped(BEHAVES, "not run: build failed"),
        ]
    elif misfits := of_ranks([each.misfits for each in built]):
        why = AssertionError(f"what build gives is no Strategy:{listed(misfits)}\nSee lightrft.strategy.protocol.")
        results = [judged(plan.xfails, BUILDS, seconds, Broken({}, why), ""), skipped(BEHAVES, "not run: no Strategy")]
    else:
        misconduct = of_ranks([each.misconduct for each in built])
        broken = Broken({}, AssertionError(f"building:{listed(misconduct)}")) if misconduct else None
        results = [judged(plan.xfails, BUILDS, seconds, None, ""), judged(plan.xfails, BEHAVES, 0.0, broken, "")]
    for result in results:
        plan.advance(result)
    return results


def ready(build: BuildStrategy, bodies: Sequence[Callable[..., None]]) -> None:
    """A rank that got this far has imported them."""


def of_ranks(told: Sequence[Sequence[str]]) -> list[str]:
    """What the ranks say, with the rank where they do not all say it."""
    everywhere = [text for text in told[0] if all(text in other for other in told)]
    alone = [f"rank {rank}: {text}" for rank, texts in enumerate(told) for text in texts if text not in everywhere]
    return everywhere + alone


def skipped(law: str, why: str) -> Result:
    """A law that was not looked at."""
    return Result(law=law, outcome=Outcome.SKIPPED, why=why)


def looks(
    target: Target, plan: Plan, pool: RankPool, reference_pool: RankPool | None
) -> list[tuple[str, Callable[[], Result]]]:
    """Everything to look at, by name, in order."""

    def of_law(law: Law) -> Callable[[], Result]:
        return lambda: result_of(law, target, plan, pool)

    found: list[tuple[str, Callable[[], Result]]] = [(law.name, of_law(law)) for law in plan.laws]
    if plan.any_order:
        found.append((ANY_ORDER, lambda: result_in_any_order(target, plan, pool)))
    if plan.against is not None:
        reference = plan.against
        found.append((AGREES, lambda: result_against(target, reference, plan, pool, reference_pool)))
    return found


def result_of(law: Law, target: Target, plan: Plan, pool: RankPool) -> Result:
    """One law."""
    if not applies(law, target):
        return skipped(law.name, f"without {law.needs}")
    start = time.monotonic()
    database = None if plan.database is None else plan.database / slug(f"{target.name}-W{target.world_size}")
    broken = search(law, target, pool, seed=plan.seed, database=database)
    seconds = time.monotonic() - start
    return judged(
        plan.xfails, law.name, seconds, broken, "" if broken is None else law_as_test(law, target, broken.values)
    )


def result_in_any_order(target: Target, plan: Plan, pool: RankPool) -> Result:
    """Programs against a model of them."""
    start = time.monotonic()
    failed = search_stateful(target, pool, examples=target.examples, seed=plan.seed)
    broken = None if failed is None else Broken({}, failed.error)
    test = "" if failed is None else program_as_test(ANY_ORDER, target, failed.program)
    return judged(plan.xfails, ANY_ORDER, time.monotonic() - start, broken, test)


def result_against(
    target: Target, reference: Target, plan: Plan, pool: RankPool, reference_pool: RankPool | None
) -> Result:
    """Programs against another backend."""
    start = time.monotonic()
    with opened(reference, plan, reference_pool) as other:
        failed = search_against(target, reference, pool, other, examples=target.examples, seed=plan.seed)
    broken = None if failed is None else Broken({}, failed.error)
    test = "" if failed is None else program_as_test(AGREES, target, failed.program, reference)
    return judged(plan.xfails, AGREES, time.monotonic() - start, broken, test)


def reference_of(build: BuildStrategy | str) -> Target:
    """What a backend is compared with: one rank of another."""
    function = load_build(build) if isinstance(build, str) else build
    lacking = LACKING.get(build, frozenset()) if isinstance(build, str) else frozenset()
    return Target(
        name=build if isinstance(build, str) else name_of(build), build=function, capabilities=CAPABILITIES - lacking
    )


def judged(xfails: Mapping[str, str], law: str, seconds: float, broken: Broken | None, test: str) -> Result:
    """What came of a law, in the light of what was expected."""
    reason = next((why for prefix, why in xfails.items() if law.startswith(prefix)), None)
    if broken is None:
        outcome = Outcome.PASSED if reason is None else Outcome.UNEXPECTED
        why = "" if reason is None else f"expected to fail ({reason}), but it passed: remove its xfail entry."
        return Result(law=law, outcome=outcome, seconds=seconds, why=why)
    if reason is not None:
        return Result(law=law, outcome=Outcome.EXPECTED, seconds=seconds, why=reason)
    hung = isinstance(broken.error, RankFailure) and bool(broken.error.hung)
    return Result(
        law=law,
        outcome=Outcome.HUNG if hung else Outcome.FAILED,
        seconds=seconds,
        why=told(broken.error),
        reproduction=test,
    )


def told(error: Exception) -> str:
    """An error with what all ranks said of it, less what only Hypothesis would say."""
    notes = [note for note in getattr(error, "__notes__", ()) if "ranks failed" in note]
    head = str(error) if isinstance(error, RankFailure) else f"{type(error).__name__}: {error}"
    return "\n".join([head, *notes])
