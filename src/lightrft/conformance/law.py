"""A law as data, a backend to check it on, and the check.

The body of a law runs on every rank and raises where the law does not hold. It knows nothing but the ``Strategy``
Protocol, so one body serves every backend, of any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from attrs import field, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from lightrft.conformance.pool import RankPool
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import BuildStrategy, Strategy

R = TypeVar("R")

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
"""Ranks answer in their own time."""


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
    needs_engine: bool = False
    bf16: bool = False
    """About mixed precision: for backends that carry out ``bf16``."""


@frozen(kw_only=True)
class Target:
    """A backend as it is checked: how it is built, on how many ranks, with which fields of the configuration."""

    name: str
    build: BuildStrategy
    world_size: int = 1
    fields: Mapping[str, object] = field(factory=dict)
    examples: int = 25
    """How many examples of a law that draws values."""


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


def check(law: Law, target: Target, pool: RankPool | None) -> None:
    """Raises, with the smallest values found, if ``target`` breaks ``law``. Without a pool it runs in this process."""

    def example(values: Mapping[str, object]) -> None:
        if pool is None:
            run_body(target.build, target.fields, law.body, values)
        else:
            pool.run(run_body, target.build, target.fields, law.body, values)

    if not law.values:
        example({})
        return

    @settings(max_examples=target.examples, deadline=None, suppress_health_check=SLOW, database=None)
    @given(**law.values)
    def examples(**values: object) -> None:
        example(values)

    examples()
