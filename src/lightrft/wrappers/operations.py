"""How a wrapper gets around operations: one context, entered for each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from attrs import Factory, evolve, field, fields, frozen

from lightrft.strategy.record import StrategyRecord

P = ParamSpec("P")
R = TypeVar("R")

FACTS = frozenset({"name", "config", "args", "world_size", "local_rank", "device"})
"""The fields of a strategy that are not operations."""

OPERATIONS: tuple[str, ...] = tuple(each.name for each in fields(StrategyRecord) if each.name not in FACTS)
"""Every operation of a strategy, in the order of the record."""


class Around(Protocol):
    """What a wrapper does about a call: it runs before the operation, and after it too."""

    def __call__(self, operation: str, arguments: Mapping[str, object], /) -> AbstractContextManager[None]:
        """``arguments`` are those of the call by name, defaults included."""
        ...


@frozen(eq=False)
class Wrapped(Generic[P, R]):
    """An operation inside a context: it takes and returns exactly what ``inner`` does.

    Arguments that ``inner`` cannot take are its own ``TypeError``, before the context is entered.
    """

    operation: str
    inner: Callable[P, R]
    around: Around
    signature: inspect.Signature = field(
        init=False, repr=False, default=Factory(lambda self: inspect.signature(self.inner), takes_self=True)
    )

    @property
    def __signature__(self) -> inspect.Signature:
        """What ``help`` and ``inspect.signature`` show: that of ``inner``."""
        return self.signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given = self.signature.bind(*args, **kwargs)
        given.apply_defaults()
        with self.around(self.operation, given.arguments):
            return self.inner(*args, **kwargs)


def wrap(strategy: StrategyRecord, operations: Iterable[str], around: Around) -> StrategyRecord:
    """``strategy`` with ``around`` around each of ``operations``; the rest is as it was."""
    wrapped = {name: Wrapped(name, getattr(strategy, name), around) for name in operations}
    # A ParamSpec holds one signature, an overloaded Protocol several: no checker can see that a wrapped operation still
    # has them all. It has, since Wrapped passes on what it gets; so the type is asserted, for all operations, here.
    return evolve(strategy, **cast("dict[str, Any]", wrapped))
