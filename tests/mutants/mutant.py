"""What a planted fault is: a good backend, or a good engine, inside a small wrapper that breaks one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

from attrs import frozen

from lightrft.backends import fake, fsdp, local
from lightrft.conformance.engines import Letters, MakeEngine
from lightrft.engines.protocol import Engine
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.record import StrategyRecord

Base = Literal["fake", "local", "fsdp"]

BASES: dict[Base, Callable[[StrategyConfig], StrategyRecord]] = {
    "fake": fake.build,
    "local": local.build,
    "fsdp": fsdp.build,
}


class Planted(Exception):
    """Raised by faults whose fault it is to raise."""


def as_it_is(strategy: StrategyRecord) -> StrategyRecord:
    """No fault in the operations."""
    return strategy


def as_given(config: StrategyConfig) -> StrategyConfig:
    """No fault in how the configuration is read."""
    return config


@frozen
class Mutant:
    """One planted fault in a backend."""

    name: str
    what: str
    """The fault, in one plain sentence."""
    law: str
    """How the name of the law begins that has to see it."""
    wrap: Callable[[StrategyRecord], StrategyRecord] = as_it_is
    base: Base = "fake"
    world_size: int = 1
    configure: Callable[[StrategyConfig], StrategyConfig] = as_given
    """How the backend under it is told another configuration than the caller's."""

    def __call__(self, config: StrategyConfig, args: object = None) -> StrategyRecord:
        """It is its own ``build``, and travels to ranks."""
        return self.wrap(BASES[self.base](self.configure(config)))


@frozen
class EngineMutant:
    """One planted fault in an engine."""

    name: str
    what: str
    """The fault, in one plain sentence."""
    law: str
    """How the name of the law begins that has to see it."""
    wrap: Callable[[Engine], Engine]
    make: MakeEngine
    """The engine without the fault."""
    computes: bool = True
    tied: bool = True


@frozen(eq=False)
class Altered:
    """An engine of which some operations are others."""

    inner: Engine
    others: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.others[name] if name in self.others else getattr(self.inner, name)


def altered(engine: Engine, **others: Any) -> Engine:
    """``engine`` with these operations, or capabilities, in place of its own."""
    return cast("Engine", Altered(engine, others))


__all__ = ["BASES", "Altered", "EngineMutant", "Letters", "Mutant", "Planted", "altered"]
