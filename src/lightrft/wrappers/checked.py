"""``checked``: ranks that disagree about the next collective operation all hear of it, instead of hanging (G4).

Before each operation in which ranks meet, a rank says what it is about to call in the store of the process group, by
which the ranks found each other, and waits there until the others have said theirs. The store works also while the
collectives of the group do not. That costs some round trips to the store for each call and makes every such operation
a meeting point: it is for finding a fault, not for the long run.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from lightrft.ops.collectives import as_number
from lightrft.strategy.record import StrategyRecord, bind
from lightrft.wrappers.operations import wrap

PREFIX = "lightrft.checked"

COMPARED: Mapping[str, tuple[str, ...]] = {
    "barrier": (),
    "all_reduce": ("op", "data"),
    "all_gather": ("data",),
    "broadcast": ("src", "data"),
    "prepare": ("models_or_model_optim_pairs", "is_rlhf"),
    "prepare_models_and_optimizers": ("actor", "critic", "reward_models", "initial_model", "max_steps"),
    "backward": ("loss", "model", "optimizer"),
    "optimizer_step": ("optimizer", "model", "name", "flush"),
    "get_grad_norm": ("model",),
    "moving_average": ("model", "model_ema", "beta"),
    "save_ckpt": ("model", "tag"),
    "load_ckpt": ("model", "tag"),
    "save_model": ("model",),
    "update_engine_weights": ("actor",),
    "gather_and_generate": ("sleep_engine",),
}
"""The operations in which ranks meet, each with the arguments in which ranks must agree."""

SLOWEST_POLL_S = 0.02
PATIENCE_S = 0.1
"""After so long a wait for all ranks at once, each one is asked for: some may have disagreed, or be gone, already."""
LINGER_S = 2.0
"""The longest that a rank that closes keeps the store for others that have not read its last word yet."""


class RankMismatch(RuntimeError):
    """Ranks called different operations, or one will not come: the text says which rank called what."""


class Store(Protocol):
    """What is asked of the store of a process group, be it TCPStore, FileStore or HashStore."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, value: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


@define(eq=False)
class Meeting:
    """What one rank knows of the others: made by ``checked``, first parameter of the functions that change it."""

    rank: int
    world_size: int
    timeout: timedelta
    store: Store | None = None
    prefix: str = ""
    """Begins this strategy's keys in the store."""
    calls: int = 0
    """The number of this rank's calls so far: the ranks' n-th calls are compared with each other."""
    oldest: int = 0
    """The first call of which this rank's own word is still in the store: the last one, as soon as all have agreed on it."""
    previous: str | None = None
    """The last operation on which all ranks agreed."""
    failure: str = ""
    is_over: bool = False
    farewell: Callable[[], None] | None = field(default=None, repr=False)


def checked(strategy: StrategyRecord, timeout: timedelta = timedelta(minutes=30)) -> StrategyRecord:
    """``strategy`` whose ranks compare each collective operation before they carry it out.

    Ranks that call different operations, or the same one with other keys, dtypes, ops or shapes (``all_gather`` takes any
    shapes), all raise :class:`RankMismatch`, and so they do where another rank has closed or ended. Numbers agree whatever
    their kind (FC24), and so do mappings of equal keys in another order. After the error ranks are in step again. A rank
    that does not come is waited for up to ``timeout``: it may be computing.

    Every rank wraps the same strategies in the same order. Nothing is checked before ``setup_distributed``, which makes
    the process group. At world size 1 this is ``strategy`` itself.
    """
    if strategy.world_size == 1:
        return strategy
    meeting = Meeting(strategy.get_rank(), strategy.world_size, timeout)
    return wrap(strategy, (*COMPARED, "close"), bind(_around, meeting))


def describe(value: object, *, shapes: bool = True) -> str:
    """What ranks compare and errors show of collective data: structure, keys, dtypes and, unless told otherwise, shapes."""
    if isinstance(value, Tensor):
        shape = ", ".join(map(str, value.shape)) if shapes else "..."
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    if isinstance(value, Mapping):
        items = (f"{key!r}: {describe(value[key], shapes=shapes)}" for key in sorted(value, key=repr))
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(describe(item, shapes=shapes) for item in value)})"
    if as_number(value) is not None:
        return "number"
    return "None" if value is None else type(value).__name__


def describe_call(operation: str, arguments: Mapping[str, object]) -> str:
    """A call as ranks compare it: the arguments of :data:`COMPARED`, in that order."""
    shown = []
    for name in COMPARED[operation]:
        value = arguments.get(name)
        number = as_number(value)
        if name == "data":
            text = describe(value, shapes=operation != "all_gather")
        elif number is not None:
            text = repr(number)
        else:
            text = repr(value) if isinstance(value, str) else describe(value)
        shown.append(f"{name}={text}")
    return f"{operation}({', '.join(shown)})"


@contextmanager
def _around(meeting: Meeting, operation: str, arguments: Mapping[str, object], /) -> Iterator[None]:
    if operation == "close":
        leave(meeting, "called close()")
        yield
        return
    call = describe_call(operation, arguments)
    meet(meeting, call)
    try:
        yield
    except Exception as error:
        # Only this rank may have failed. The others hear of it when it ends without having called anything more.
        meeting.failure = f", after {type(error).__name__} in {call}"
        raise
    meeting.failure = ""


def _join(meeting: Meeting) -> Store | None:
    """The store, once there is a process group: the same part of it for each rank's k-th checked strategy."""
    if meeting.store is None and not meeting.is_over and dist.is_initialized() and dist.group.WORLD is not None:
        # A clone has its own connection: what torch's own threads ask of the store does not wait for ours.
        store: Store = dist.group.WORLD.get_group_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs
        number = store.add(f"{PREFIX}/strategies of rank {meeting.rank}", 1)
        meeting.store, meeting.prefix = store, f"{PREFIX}/{number}"
        store.set(f"{meeting.prefix}/0/{meeting.rank}", "joined")
        meeting.farewell = bind(_end, meeting)
        atexit.register(meeting.farewell)
    return meeting.store


def meet(meeting: Meeting, call: str) -> None:
    """Returns when every rank has called the same; raises as soon as any has not."""
    store = _join(meeting)
    if store is None:
        return
    meeting.calls += 1
    word, gone = f"{meeting.prefix}/{meeting.calls}", f"{meeting.prefix}/gone"
    said = {meeting.rank: call}
    awaited = [rank for rank in range(meeting.world_size) if rank != meeting.rank]
    start = time.monotonic()
    try:
        store.set(f"{word}/{meeting.rank}", call)
        while awaited:
            everybody = store.check([f"{word}/{rank}" for rank in awaited])
            waited = time.monotonic() - start
            if everybody or waited > PATIENCE_S:
                # In this order: a rank may come, do its part and close between the two readings.
                farewells = {} if everybody else _heard(store, gone, awaited)
                said |= _heard(store, word, awaited)
                awaited = [rank for rank in awaited if rank not in said]
                farewells = {rank: how for rank, how in farewells.items() if rank in awaited}
                if len(set(said.values())) > 1 or farewells:
                    raise RankMismatch(_disagreement(meeting, said, farewells))
            if awaited and waited > meeting.timeout.total_seconds():
                raise RankMismatch(_absence(meeting, said))
            if awaited:
                time.sleep(min(SLOWEST_POLL_S, waited / 10))
        # Everybody has come to this call, so everybody has read what was said at the ones before.
        for old in range(meeting.oldest, meeting.calls):
            store.delete_key(f"{meeting.prefix}/{old}/{meeting.rank}")
    except dist.DistError as error:
        raise RankMismatch(
            f"rank {meeting.rank} called {call}, and the store by which the ranks agree does not answer: the process that "
            f"holds it, which is rank 0 or the launcher, has closed or ended. See its log for the first error."
        ) from error
    meeting.oldest = meeting.calls
    meeting.previous = call


def _heard(store: Store, prefix: str, ranks: Iterable[int]) -> dict[int, str]:
    """What is there under ``prefix``, by rank."""
    return {rank: store.get(f"{prefix}/{rank}").decode() for rank in ranks if store.check([f"{prefix}/{rank}"])}


def _disagreement(meeting: Meeting, said: Mapping[int, str], farewells: Mapping[int, str]) -> str:
    by_rank = {**farewells, **{rank: f"called {call}" for rank, call in said.items()}}
    calls = "; ".join(
        f"rank {rank} {by_rank.get(rank, 'has not called anything yet')}" for rank in range(meeting.world_size)
    )
    return (
        f"ranks disagree about operation {meeting.calls}: {calls}. {_before(meeting)} "
        f"Every rank must call the same operations in the same order: look for a branch on the rank or on a rank's own data."
    )


def _absence(meeting: Meeting, said: Mapping[int, str]) -> str:
    missing = [rank for rank in range(meeting.world_size) if rank not in said]
    return (
        f"rank {meeting.rank} called {said[meeting.rank]} and waited {meeting.timeout.total_seconds():g} s for "
        f"rank {', '.join(map(str, missing))}. {_before(meeting)} "
        f"See the missing rank's log; if it is only slow, pass a longer timeout to checked()."
    )


def _before(meeting: Meeting) -> str:
    if meeting.previous is None:
        return "No operation was common to all ranks before."
    return f"The last operation of all ranks was {meeting.previous}."


def _end(meeting: Meeting) -> None:
    leave(meeting, f"ended without close(){meeting.failure}")


def leave(meeting: Meeting, how: str) -> None:
    """Tells the others, once, that this rank will come no more."""
    store = _join(meeting)
    meeting.is_over = True
    meeting.store = None
    if store is None:
        return
    if meeting.farewell is not None:
        atexit.unregister(meeting.farewell)
    with suppress(dist.DistError):  # The store went first: there is nobody to tell.
        store.set(f"{meeting.prefix}/gone/{meeting.rank}", how)
        if meeting.oldest == meeting.calls > 0:
            _linger(meeting, store)


def _linger(meeting: Meeting, store: Store) -> None:
    """Waits until the others have read the last call, for the store may go with this process or its process group."""
    until = time.monotonic() + LINGER_S
    for rank in range(meeting.world_size):
        # Whoever has read what all said removes its own word of the call before.
        while rank != meeting.rank and store.check([f"{meeting.prefix}/{meeting.calls - 1}/{rank}"]):
            if time.monotonic() > until:
                return
            time.sleep(SLOWEST_POLL_S / 10)
