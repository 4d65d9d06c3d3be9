"""What tests share."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.checkpoints.state import encoded_state, write_state
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


def save_state(
    directory: Path,
    *,
    model: Module,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    counters: Mapping[str, int] | None = None,
    client_state: Mapping[str, object] | None = None,
) -> None:
    """The files of a checkpoint in ``directory``, which exists: nothing is written before all is known to be storable."""
    state = encoded_state(
        model=model, optimizer=optimizer, scheduler=scheduler, counters=counters, client_state=client_state
    )
    write_state(directory, state)
