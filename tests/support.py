"""Types that tests share."""

from __future__ import annotations

from typing import Protocol

from lightrft.strategy.record import StrategyRecord


class MakeStrategy(Protocol):
    """A strategy of the backend under test, from the fields of its configuration; fp32 unless told otherwise."""

    def __call__(self, **fields: object) -> StrategyRecord: ...
