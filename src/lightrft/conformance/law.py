"""A law as data, a backend to check it on, and the check.

The body of a law runs on every rank and raises where the law does not hold. It knows nothing but the ``Strategy``
Protocol, so one body serves every backend, of any number of ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, TypeVar, get_args

from attrs import field, frozen
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import seed as with_seed
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import SearchStrategy

from lightrft.conformance.pool import RankFailure, RankPool
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import BuildStrategy, Strategy

R = TypeVar("R")

Capability = Literal["bf16", "checkpoints", "engine"]
"""What a backend may lack and be one all the same: mixed precision, checkpoints, an inference engine."""
CAPABILITIES: frozenset[Capability] = frozenset(get_args(Capability))

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
"""Ranks answer in their own time."""
SHRINK_S = 20.0
"""Seconds to look for smaller values after the first that failed."""


class Make(Protocol):
    """A strategy of the backend under test, set up, from the fields of its configuration; fp32 unless told otherwise."""

    def __call__(self, **fields: object) -> Strategy: ...


class Body(Protocol):
    """What every rank runs."""

    def __call__(self, make: Make, /, **values: object) -> None: ...


@frozen
class Law:
    """One thing that every backend has to do, or a fault that none may have."""

    name: str
    """Its number in docs/laws.md and those of the field cases that it covers, then what it says."""
    body: Callable[..., None]
    values: Mapping[str, SearchStrategy[object]] = field(factory=dict)
    """What the body is given, drawn anew for each example; without any it runs once."""
    needs: Capability | None = None
    """What a backend has to be able to do, for the law to be about it."""

    @property
    def numbers(self) -> tuple[str, ...]:
        """The statements and field cases that it is about: ``("T7", "FC21")``."""
        return tuple(self.name.partition(":")[0].split())

    @property
    def says(self) -> str:
        """The name without them."""
        return self.name.partition(":")[2].strip()


@frozen(kw_only=True)
class Target:
    """A backend as it is checked: how it is built, on how many ranks, with which fields of the configuration."""

    name: str
    build: BuildStrategy
    world_size: int = 1
    fields: Mapping[str, object] = field(factory=dict)
    capabilities: frozenset[Capability] = CAPABILITIES
    examples: int = 25
    """How many examples of a law that draws values."""


def applies(law: Law, target: Target) -> bool:
    """Whether ``law`` is about what ``target`` can do."""
    return law.needs is None or law.needs in target.capabilities


def run_body(
    build: BuildStrategy, fields: Mapping[str, object], body: Callable[..., R], values: Mapping[str, object]
) -> R:
    """Runs a body on this rank and closes the strategies that it made."""
    made: list[Strategy] = []

    def make(**more: object) -> Strategy:
        strategy = build(StrategyConfig.from_args({"bf16": False, **fields, **more}))
        made.append(strategy)
        strategy.setup_distributed()
        return strategy

    try:
        return body(make, **values)
    finally:
        for strategy in made:
            strategy.close()


def run_example(law: Law, target: Target, pool: RankPool | None, values: Mapping[str, object]) -> None:
    """One example on every rank. Without a pool it runs in this process."""
    if pool is None:
        run_body(target.build, target.fields, law.body, values)
    else:
        pool.run(run_body, target.build, target.fields, law.body, values)


# -------------------------------------------------------------------------------------------------------------- search


@frozen(eq=False)
class Broken:
    """A law that does not hold: the smallest values found for which it does not, and what was raised."""

    values: Mapping[str, object]
    error: Exception


class SearchEnded(BaseException):
    """Ends a search at once; Hypothesis would take an ``Exception`` for one more failure to make smaller."""


def search(
    law: Law, target: Target, pool: RankPool | None, *, seed: int | None = None, database: Path | None = None
) -> Broken | None:
    """Looks for values for which ``target`` breaks ``law``; None where there are none among ``target.examples``.

    Equal seeds look at equal values. ``database``: a directory that keeps what failed, to be looked at first next time.
    Making values smaller ends after ``SHRINK_S`` seconds, and at once when a rank died or hangs.
    """
    found: list[Broken] = []
    began: list[float] = []

    def example(values: Mapping[str, object]) -> None:
        if began and time.monotonic() > began[0] + SHRINK_S:
            for known in found:
                if repr(known.values) == repr(values):
                    found.append(known)
                    raise known.error
            reject()
        try:
            run_example(law, target, pool, values)
        except Exception as error:
            found.append(Broken(values, error))
            began.append(time.monotonic())
            if isinstance(error, RankFailure):
                raise SearchEnded from error
            raise

    limits = settings(
        max_examples=target.examples,
        deadline=None,
        suppress_health_check=SLOW,
        database=None if database is None else DirectoryBasedExampleDatabase(database / slug(law.name)),
        report_multiple_bugs=False,
        print_blob=False,
    )

    def examples(**values: object) -> None:
        example(values)

    try:
        if law.values:
            drawn = given(**law.values)(examples)
            # Settings come last: a seed takes the database away from those that are there already.
            limits(drawn if seed is None else with_seed(seed)(drawn))()
        else:
            example({})
    except (Exception, SearchEnded):
        if not found:
            raise
        # The last run was of the smallest values.
        return found[-1]
    return None


def slug(name: str) -> str:
    """A name as one of a file."""
    return re.sub(r"[^\w]+", "-", name).strip("-")


def check(law: Law, target: Target, pool: RankPool | None) -> None:
    """Raises, with the smallest values found, if ``target`` breaks ``law``. Without a pool it runs in this process."""
    broken = search(law, target, pool)
    if broken is not None:
        broken.error.add_note(f"\n{law.name}: broken by {target.name} for {dict(broken.values)}")
        raise broken.error
