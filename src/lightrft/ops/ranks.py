"""What a single rank answers about itself (W1, W3)."""

from __future__ import annotations

from datetime import timedelta

from lightrft.ops.rollout import close_engine
from lightrft.ops.seeds import seed_rank
from lightrft.strategy.record import RunState


def get_rank(state: RunState) -> int:
    """This process's rank."""
    return state.world.rank


def is_rank_0(state: RunState) -> bool:
    """Whether this is the rank that speaks."""
    return state.world.rank == 0


def print_on_rank_0(state: RunState, *msg: object) -> None:
    """The one place outside the command line that prints, since that is what its caller asked for."""
    if state.world.rank == 0:
        print(*msg, flush=True)  # noqa: T201


def set_up_alone(state: RunState, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
    """Seeds this process, once: there is nobody to wait for."""
    if not state.is_set_up:
        seed_rank(state)
        state.is_set_up = True


def wait_for_nobody(state: RunState) -> None:
    """The barrier of a single rank."""


def close_alone(state: RunState) -> None:
    """Ends the engine; a single process has opened nothing else."""
    close_engine(state.engine)
