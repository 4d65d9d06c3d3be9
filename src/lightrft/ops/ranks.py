"""Ranks: what each answers about itself, how they find each other and how they part (W1 to W4)."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
import torch.distributed as dist

from lightrft.errors import ConfigError, RankError
from lightrft.ops.peers import meet, naming_peers
from lightrft.ops.rollout import close_engine
from lightrft.ops.seeds import seed_rank
from lightrft.ops.world import World, discover, place_on_machine
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.record import RunState

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others where the caller does not say: torch's own default for gloo."""
PARTING = timedelta(seconds=10)
"""How long a rank that leaves waits for the others to leave with it."""


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


# --------------------------------------------------------------------------------------------------------------- alone


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


# ------------------------------------------------------------------------------------------------------------ together


def world_of_ranks(config: StrategyConfig) -> World:
    """The world of the process group, where somebody has made one, else that of the launcher."""
    if not dist.is_initialized():
        return discover(local_rank=config.local_rank)
    return World(dist.get_rank(), dist.get_world_size(), place_on_machine(local_rank=config.local_rank))


def device_of_rank(world: World) -> torch.device:
    """The rank's own GPU where there are any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {world.local_rank} has no GPU: this machine shows {torch.cuda.device_count()}. "
            f"Start at most that many processes on it."
        )
    return torch.device("cuda", world.local_rank)


def join_ranks(state: RunState, timeout: timedelta | None = None) -> None:
    """Makes the process group, unless somebody has made one already, and seeds this rank. Once.

    Raises ``RankError`` when not every rank comes within ``timeout``.
    """
    if not dist.is_initialized():
        if state.device.type == "cuda":
            torch.cuda.set_device(state.device)
        open_process_group(state, TIMEOUT if timeout is None else timeout)
        state.owns_process_group = True
    state.peers = meet(state)
    seed_rank(state)
    state.is_set_up = True


def open_process_group(state: RunState, timeout: timedelta) -> None:
    """gloo for what lies on the CPU, and NCCL beside it where there are GPUs."""
    world = state.world
    backend = "cpu:gloo,cuda:nccl" if state.device.type == "cuda" else "gloo"
    try:
        if world.address is None:
            # Alone and without a launcher: a store in memory, so that no port is opened.
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, and left out of torch's own list
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(
                backend,
                init_method=f"tcp://{world.address}",
                rank=world.rank,
                world_size=world.world_size,
                timeout=timeout,
            )
    except (RuntimeError, ValueError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise RankError(
            f"rank {world.rank} of {world.world_size} did not meet the others at {world.address} within "
            f"{timeout.total_seconds():g} s: {_first_line(error)}. Start all {world.world_size} ranks with one launcher; "
            f"where the port is in use, choose another (torchrun --master-port)."
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def require_set_up(state: RunState, operation: str) -> None:
    """Refuses what needs the other ranks before they were met."""
    if not state.is_set_up:
        raise RankError(f"{operation}: the ranks have not met yet. Call strategy.setup_distributed() first.")


def wait_for_ranks(state: RunState) -> None:
    """A barrier."""
    require_set_up(state, "barrier")
    if state.world.world_size > 1:
        with naming_peers(state, "barrier"):
            if state.device.type == "cuda":
                dist.barrier(device_ids=[state.device.index])
            else:
                dist.barrier()


def leave_ranks(state: RunState) -> None:
    """Ends the engine and, if this strategy made it, the process group.

    The ranks leave together: a process that ends while another still talks to it makes that one fail. A rank that is
    gone is not waited for long.
    """
    close_engine(state.engine)
    state.is_set_up = False
    if not state.owns_process_group or not dist.is_initialized():
        return
    state.owns_process_group = False
    try:
        if state.world.world_size > 1 and state.device.type == "cpu":
            dist.monitored_barrier(timeout=PARTING)  # gloo's own: NCCL has no barrier that gives up
    except RuntimeError as error:
        logger.warning("rank %d leaves without the others: %s", state.world.rank, _first_line(error))
    dist.destroy_process_group()
