"""What tests share."""

from __future__ import annotations

import signal
from typing import Protocol

from lightrft.rlvr.tasks import Task
from lightrft.strategy.record import StrategyRecord


class MakeStrategy(Protocol):
    """A strategy of the backend under test, from the fields of its configuration; fp32 unless told otherwise."""

    def __call__(self, **fields: object) -> StrategyRecord: ...


def hears_ctrl_c() -> None:
    """What a shell starts in the background ignores SIGINT, and so would everything that a test starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def varied(task: Task, text: str) -> float:
    """A reward that even a random model meets: no two samples of a group need have the same."""
    return sum(map(ord, text)) % 10 / 10
