"""The suite proves itself: every planted fault breaks the law that is about it, and without a fault that law holds."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import Phase, given, settings

from lightrft.conformance.engines import ENGINE_LAWS, EngineLaw, applies, check_engine
from lightrft.conformance.law import CAPABILITIES, SLOW, Law, Target, run_example
from lightrft.conformance.law import applies as applies_to
from lightrft.conformance.laws import LAWS
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.conformance.run import LACKING
from lightrft.engines.protocol import Engine
from mutants.engine_faults import ENGINE_MUTANTS
from mutants.faults import MUTANTS
from mutants.mutant import EngineMutant, Letters, Mutant, Planted

pytestmark = pytest.mark.mutants

IN_PROCESS, ON_RANKS = 10, 5
"""Examples of a law that draws values, as the profile ``quick`` has them."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks for all that exists only there."""
    with rank_pool(2, timeout=60.0) as pool:
        yield pool


def broken(law: Law, target: Target, pool: RankPool | None) -> Exception | None:
    """What ``target`` raises under ``law``; always the same examples, and none made smaller."""

    @settings(
        max_examples=target.examples,
        deadline=None,
        suppress_health_check=SLOW,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(**law.values)
    def examples(**values: object) -> None:
        run_example(law, target, pool, values)

    try:
        examples() if law.values else run_example(law, target, pool, {})
    except Exception as error:
        return error
    return None


def target_of(mutant: Mutant) -> Target:
    """The mutant, checked as the backend under it would be."""
    target = Target(
        name=mutant.name, build=mutant, world_size=mutant.world_size,
        examples=IN_PROCESS if mutant.world_size == 1 else ON_RANKS,
    )  # fmt: skip
    return evolve(target, capabilities=CAPABILITIES - LACKING["fake"]) if mutant.base == "fake" else target


def laws_of(mutant: Mutant) -> tuple[list[Law], list[Law]]:
    """Those that have to see the fault, and the others."""
    laws = [law for law in LAWS if applies_to(law, target_of(mutant))]
    expected = [law for law in laws if law.name.startswith(mutant.law)]
    assert expected, f"no law that is about {mutant.base} begins with {mutant.law!r}"
    return expected, [law for law in laws if law not in expected]


def is_of_the_law(error: Exception) -> bool:
    """Not a mistake of the mutant's own code, which would break any law."""
    if isinstance(error, Planted):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    told = "\n".join([str(error), *getattr(error, "__notes__", ())])
    of_ranks = [re.findall(r'File "([^"]+)"', part)[-1:] for part in re.split(r"\nrank \d+: Traceback", told)[1:]]
    ends = [Path(frames[-1].filename), *(Path(name) for names in of_ranks for name in names)]
    return all(end.parent != Path(__file__).parent for end in ends)


def survivor(name: str, what: str, expected: Sequence[str], others: Sequence[str]) -> str:
    """The sentence for a fault that the law about it does not see."""
    if others:
        return f"{name}: that {what} is seen by {others}, and not by the law about it, {list(expected)}."
    return f"{name} SURVIVES: that {what} is seen by no law, not even by {list(expected)}. A law is missing, or weak."


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.name}-W{mutant.world_size}")
def test_a_mutant_is_killed_by_the_law_about_it(mutant: Mutant, ranks: RankPool) -> None:
    pool = ranks if mutant.world_size > 1 else None
    expected, others = laws_of(mutant)
    target = target_of(mutant)
    for law in expected:
        if (error := broken(law, target, pool)) is not None:
            assert is_of_the_law(error), f"{mutant.name} fails by itself: {error!r}"
            return
    seen = [law.name for law in others if broken(law, target, pool) is not None]
    pytest.fail(survivor(mutant.name, mutant.what, [law.name for law in expected], seen))


def bases() -> list[tuple[Law, Mutant]]:
    """Every law that kills, with each base on which it does."""
    found: dict[tuple[str, str, int], tuple[Law, Mutant]] = {}
    for mutant in MUTANTS:
        base = Mutant(mutant.base, "there is no fault", mutant.law, base=mutant.base, world_size=mutant.world_size)
        for law in laws_of(mutant)[0]:
            found[law.name, base.base, base.world_size] = (law, base)
    return list(found.values())


@pytest.mark.parametrize(
    ("law", "base"),
    [pytest.param(*each, id=f"{each[1].name}-W{each[1].world_size}-{each[0].name}") for each in bases()],
)
def test_without_a_fault_the_law_holds(law: Law, base: Mutant, ranks: RankPool) -> None:
    error = broken(law, target_of(base), ranks if base.world_size > 1 else None)
    assert error is None, f"{law.name} is broken by {base.name} itself: {error!r}"


# -------------------------------------------------------------------------------------------------------------- engines


def engine_broken(law: EngineLaw, mutant: EngineMutant, directory: Path) -> Exception | None:
    """What the mutant raises under ``law``."""

    def make(directory: Path, tokenizer: Letters | None) -> Engine:
        return mutant.wrap(mutant.make(directory, tokenizer))

    try:
        assert check_engine(law, make, directory, tied=mutant.tied, computes=mutant.computes), "the law does not apply"
    except Exception as error:
        return error
    return None


def engine_laws_of(mutant: EngineMutant, directory: Path) -> tuple[list[EngineLaw], list[EngineLaw]]:
    """Those that have to see the fault, and the others."""
    expected = [law for law in ENGINE_LAWS if law.name.startswith(mutant.law)]
    assert expected, f"no law of engines begins with {mutant.law!r}"
    return expected, [law for law in ENGINE_LAWS if law not in expected]


@pytest.mark.parametrize("mutant", ENGINE_MUTANTS, ids=lambda mutant: mutant.name)
def test_an_engine_mutant_is_killed_by_the_law_about_it(mutant: EngineMutant, tmp_path: Path) -> None:
    expected, others = engine_laws_of(mutant, tmp_path)
    for law in expected:
        if (error := engine_broken(law, mutant, tmp_path)) is not None:
            assert is_of_the_law(error), f"{mutant.name} fails by itself: {error!r}"
            return
    good = mutant.make(tmp_path, Letters())
    about = [law for law in others if applies(law, good, computes=mutant.computes)]
    seen = [law.name for law in about if engine_broken(law, mutant, tmp_path) is not None]
    pytest.fail(survivor(mutant.name, mutant.what, [law.name for law in expected], seen))


def same_engine(engine: Engine) -> Engine:
    return engine


@pytest.mark.parametrize("mutant", {(one.law, one.make, one.tied): one for one in ENGINE_MUTANTS}.values(),
                         ids=lambda mutant: f"{mutant.make.__name__}-{mutant.law}")  # fmt: skip
def test_without_a_fault_the_law_of_engines_holds(mutant: EngineMutant, tmp_path: Path) -> None:
    good = evolve(mutant, name="good", what="there is no fault", wrap=same_engine)
    for law in engine_laws_of(mutant, tmp_path)[0]:
        error = engine_broken(law, good, tmp_path)
        assert error is None, f"{law.name} is broken by the engine itself: {error!r}"


# --------------------------------------------------------------------------------------------------------- the faults


def test_there_are_faults_for_every_group_of_laws_and_no_two_are_the_same() -> None:
    names = [(mutant.name, mutant.world_size) for mutant in MUTANTS]
    assert len(names) == len(set(names))
    assert len({mutant.name for mutant in ENGINE_MUTANTS}) == len(ENGINE_MUTANTS)
    assert len(MUTANTS) + len(ENGINE_MUTANTS) >= 45
    assert {mutant.law[0] for mutant in MUTANTS} >= set("WTGKRFM")
    assert any(mutant.world_size == 2 for mutant in MUTANTS)


def test_every_law_is_proved_by_some_fault() -> None:
    """A law that no fault breaks may be one that nothing can break."""
    unproved = [law.name for law in LAWS if not law.name.startswith(tuple(mutant.law for mutant in MUTANTS))]
    of_engines = tuple(mutant.law for mutant in ENGINE_MUTANTS)
    unproved += [law.name for law in ENGINE_LAWS if not law.name.startswith(of_engines)]
    assert not unproved, f"no fault is planted that these laws have to see: {unproved}"
