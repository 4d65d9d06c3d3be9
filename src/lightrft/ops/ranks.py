"""Ranks: what each answers about itself, how they find each other and how they part (W1 to W4)."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from lightrft.errors import ConfigError, RankError
from lightrft.ops.peers import ended, meet, naming_peers
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
PAUSE_S = 0.1
"""Between two looks for rank 0."""
LATE = timedelta(seconds=2)
"""How much later than its timeout torch may give up by itself: its text says more than ours can."""


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


ENGINE_FIELDS = ("enable_engine_sleep", "engine_mem_util", "engine_tp_size", "weight_sync_bucket_mb")
"""The configuration of engines, which every backend of ranks carries out where the engine can."""


def check_engine_groups(config: StrategyConfig, world: World) -> None:
    """Raises ``ConfigError`` where ranks are left over that share no engine."""
    if world.world_size % config.engine_tp_size:
        raise ConfigError(
            f"engine_tp_size={config.engine_tp_size} does not divide world_size={world.world_size}: every engine is of as "
            f"many ranks. Use a divisor of {world.world_size}."
        )


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


def set_up_ranks(state: RunState, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
    """Meets the other ranks, once; where they sit makes no difference."""
    if not state.is_set_up:
        join_ranks(state, timeout)


def join_ranks(state: RunState, timeout: timedelta | None = None) -> None:
    """Makes the process group, unless somebody has made one already, and seeds this rank. Once.

    Raises ``RankError`` when not every rank comes within ``timeout``.
    """
    if not dist.is_initialized():
        if state.device.type == "cuda":
            torch.cuda.set_device(state.device)
        open_process_group(state, TIMEOUT if timeout is None else timeout)
        state.owns_process_group = True
    with naming_peers(state, "setup_distributed"):
        state.peers = meet(state)
    seed_rank(state)
    state.is_set_up = True


def open_process_group(state: RunState, timeout: timedelta) -> None:
    """gloo for what lies on the CPU, and NCCL beside it where there are GPUs."""
    world = state.world
    backend = "cpu:gloo,cuda:nccl" if state.device.type == "cuda" else "gloo"
    try:
        store = store_of_ranks(world, timeout)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise RankError(
            f"rank {world.rank} of {world.world_size} did not meet the others at {world.address} within "
            f"{timeout.total_seconds():g} s: {_first_line(error)}. Start all {world.world_size} ranks with one launcher; "
            f"where the port is in use, choose another (torchrun --master-port)."
        ) from error


def store_of_ranks(world: World, timeout: timedelta) -> Store:
    """Where the ranks find each other: in memory for one rank without a launcher, so that no port is opened for it.

    Looked for in a thread: torch waits without end for a word of another program that has the port and stays silent.
    """
    if world.address is None:
        return dist.HashStore()  # type: ignore[attr-defined]  # public, and left out of torch's own list
    if world.rank > 0:
        wait_for_listener(world.address, timeout)
    found: list[Store] = []
    failed: list[Exception] = []

    def look() -> None:
        try:
            store, *_ = next(rendezvous(f"tcp://{world.address}", world.rank, world.world_size, timeout=timeout))
            found.append(store)
        except Exception as error:
            failed.append(error)

    thread = Thread(target=look, name="lightrft-rendezvous", daemon=True)
    thread.start()
    thread.join((timeout + LATE).total_seconds())
    if failed:
        raise failed[0]
    if not found:
        raise RuntimeError("whoever has that port does not answer as rank 0 would, or rank 0 is not there")
    found[0].set_timeout(timeout)
    return found[0]


def wait_for_listener(address: str, timeout: timedelta) -> None:
    """Returns when somebody listens there.

    torch would wait too, but with pauses that grow: it was seen to give up after three times its timeout.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = max(deadline - time.monotonic(), PAUSE_S)
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left):
                return
        except OSError as error:
            if time.monotonic() + PAUSE_S > deadline:
                raise RuntimeError(f"nobody listens there ({error.strerror or error})") from error
        time.sleep(PAUSE_S)


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
    gone is not waited for, and one that is busy no longer than ``PARTING``.
    """
    close_engine(state.engine)
    state.is_set_up = False
    state.mesh = None  # it holds the process group
    if not state.owns_process_group or not dist.is_initialized():
        return
    state.owns_process_group = False
    if state.world.world_size > 1:
        say_goodbye(state)
    dist.destroy_process_group()


def say_goodbye(state: RunState) -> None:
    """Waits until all ranks are about to leave.

    By the store of the process group: gloo's monitored barrier keeps to its timeout on rank 0 alone, NCCL has none.
    """
    assert dist.group.WORLD is not None
    store, size = dist.group.WORLD.get_group_store(), state.world.world_size
    try:
        number = store.add("lightrft/leaving", 1)
        parting = -(-number // size)  # a launcher's store outlives the process group: this is not always the first
        everyone = is_awaited(state, lambda: store.add("lightrft/leaving", 0) >= parting * size)
        store.add("lightrft/left", 1)
        if everyone and state.world.rank == 0:  # where the store is: it goes last
            is_awaited(state, lambda: store.add("lightrft/left", 0) >= parting * size)
    except RuntimeError as error:
        everyone = False
        logger.debug("the store of the process group: %s", _first_line(error))
    if not everyone:
        logger.warning("rank %d of %d leaves without the others", state.world.rank, size)


def is_awaited(state: RunState, condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` came true within ``PARTING``, or before a rank was gone."""
    deadline = time.monotonic() + PARTING.total_seconds()
    while not condition():
        if time.monotonic() > deadline or ended(state):
            return condition()
        time.sleep(0.01)
    return True
