"""Naming the rank that is gone: what a broken connection says is an address, what a user needs is a rank."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from attrs import evolve
from torch.nn import Module

from lightrft.errors import RankError, listed
from lightrft.strategy.record import Peer, RunState

GRACE = 2.0
"""Seconds between a peer's broken connection and its process being seen as ended."""


@contextmanager
def failing_together(
    tell: Callable[[str], Sequence[str]], operation: str, kind: Callable[[str], Exception]
) -> Iterator[None]:
    """What fails on one rank inside is an error on all of them, so that none waits for one that is gone.

    ``tell`` gives every rank's text for this rank's own, empty where nothing failed; ``kind`` makes the error of the others.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    told = tell("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
    if failed:
        raise kind(f"{operation} failed elsewhere:{listed(failed)}")


def this_process() -> Peer:
    """Where this rank runs."""
    return Peer(socket.gethostname(), os.getpid())


def meet(state: RunState) -> Sequence[Peer]:
    """The processes of all ranks, in rank order."""
    peers: list[Peer | None] = [None] * state.world.world_size
    here = this_process().host
    dist.all_gather_object(peers, this_process())
    # Containers may share a name, and see nothing of each other's processes.
    return [
        evolve(peer, host=f"another {here}") if peer.host == here and not is_running(peer) else peer
        for peer in peers
        if peer is not None
    ]


def is_running(peer: Peer) -> bool:
    """Whether the process of a rank on this machine goes on: one that was killed and not yet reaped does not."""
    status = Path(f"/proc/{peer.pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return status.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except (FileNotFoundError, ProcessLookupError):
            return False
    try:
        os.kill(peer.pid, 0)
    except ProcessLookupError:
        return False
    return True


def ended(state: RunState) -> list[int]:
    """The ranks on this machine whose process has ended."""
    here = this_process().host
    return [rank for rank, peer in enumerate(state.peers) if peer.host == here and not is_running(peer)]


def gone(state: RunState) -> list[int]:
    """Those, given a moment: a connection breaks before the process is seen as ended."""
    deadline = time.monotonic() + GRACE
    while not (found := ended(state)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def explanation(state: RunState, operation: str) -> str:
    """What is known when a connection broke or waited too long during ``operation``."""
    lost = gone(state)
    who = f"rank {state.world.rank} of {state.world.world_size}"
    if lost:
        names = ", ".join(f"rank {rank} (process {state.peers[rank].pid})" for rank in lost)
        return f"{who}, {operation}: {names} is gone. Its own output, or the system's log, says why; then start again."
    places = ", ".join(f"rank {rank} on {peer.host}" for rank, peer in enumerate(state.peers))
    return (
        f"{who}, {operation}: the connection to another rank broke, or it did not come in time. All ranks of this "
        f"machine run; the ranks are: {places}. Look at the others' output."
    )


@contextmanager
def naming_peers(state: RunState, operation: str) -> Iterator[None]:
    """Turns a broken connection inside into an error that names the rank that is gone."""
    try:
        yield
    except RuntimeError as error:
        if not is_connection_error(error):
            raise
        raise RankError(explanation(state, operation)) from error


def is_connection_error(error: BaseException) -> bool:
    """Whether ``error`` is about another rank: torch's own kind, or gloo's, which comes as a plain RuntimeError."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/transport" in text or "Connection closed by peer" in text)


def note_peers_in_forward(state: RunState, model: Module) -> None:
    """A forward of a sharded model meets the other ranks too: its error gets a note that names the one that is gone."""

    def look(module: Module, args: object, output: object) -> None:
        error = sys.exc_info()[1]
        if error is not None and is_connection_error(error) and not getattr(error, "__notes__", None):
            error.add_note(explanation(state, "forward"))

    model.register_forward_hook(look, always_call=True)
