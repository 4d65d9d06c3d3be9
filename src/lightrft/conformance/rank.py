"""The side of a rank: what travels between it and its pool, and the life that it leads.

Everything here is sent as plain pickle over one pipe a rank.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import TypeAlias

from attrs import frozen

START_S = 120.0
"""Seconds for the start of all ranks, each of which imports torch."""


# ------------------------------------------------------------------------------------------------ what goes to and fro


@frozen
class Seat:
    """What a new process is told about itself."""

    rank: int
    world_size: int
    timeout: float
    directory: str
    parent: int
    environ: Mapping[str, str]
    output: str | None = None
    """A file that gets all that the rank would write to the terminal."""


@frozen
class Call:
    """One run. ``modules`` maps those that the payload needs to their files, None where only their names are known."""

    payload: bytes
    modules: Mapping[str, str | None]
    path: Sequence[str]


@frozen
class InStep:
    """Asks for a barrier."""


@frozen
class Stop:
    """Asks to leave the process group and to end."""


@frozen
class Returned:
    """A rank's result, pickled, and whether it still is in its process group."""

    payload: bytes
    in_group: bool


@frozen
class Raised:
    """A rank's exception: its traceback as text, and itself in pickle if that brings it back whole."""

    summary: str
    traceback: str
    payload: bytes | None
    in_group: bool


@frozen
class Ended:
    """A rank's process ended in the middle of a run."""

    exitcode: int | None

    def __str__(self) -> str:
        if self.exitcode is not None and self.exitcode < 0:
            return f"was killed by {signal.Signals(-self.exitcode).name}"
        return f"ended with exit code {self.exitcode}"


@frozen
class Silent:
    """A rank gave no answer in time."""

    text: str
    stacks: str = ""
    """Where its threads stood."""


Answer: TypeAlias = Returned | Raised
Outcome: TypeAlias = Returned | Raised | Ended | Silent


# ------------------------------------------------------------------------------------------------------ in each rank


def serve(seat: Seat, pipe: Connection) -> None:
    """The life of a rank."""
    # Ctrl-C reaches the whole process group; the parent decides what becomes of the ranks. It started them with the
    # signal blocked, since the imports before this line take their time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    stacks = open(stacks_file(seat.directory, seat.rank), "w")  # noqa: SIM115  # as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_leave_with_parent, args=(seat,), daemon=True).start()
    if seat.output is not None:
        output = os.open(seat.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
    os.environ.update(seat.environ)
    places = {"RANK": seat.rank, "WORLD_SIZE": seat.world_size}
    os.environ.update({f"{local}{name}": str(value) for name, value in places.items() for local in ("", "LOCAL_")})

    try:
        pipe.send_bytes(_answer(lambda: _join_group(seat)))
        while not isinstance(request := pickle.loads(pipe.recv_bytes()), Stop):
            pipe.send_bytes(_answer(_barrier if isinstance(request, InStep) else _loaded(request)))
    except (EOFError, OSError):
        _leave_with_parent(seat)  # the pipe has no other end any more

    import torch.distributed as dist

    if dist.is_initialized():
        # Ranks that end without both of these abort now and then.
        dist.barrier()
        dist.destroy_process_group()


def stacks_file(directory: str, rank: int) -> str:
    """Where a rank writes its stacks when it gets SIGUSR1."""
    return os.path.join(directory, f"stacks-{rank}")


def _leave_with_parent(seat: Seat) -> None:
    """Ends this process when its parent has gone; the second look is for pipes that a fork of the parent keeps open."""
    parent = parent_process()
    sentinels = [] if parent is None else [parent.sentinel]
    while os.getppid() == seat.parent and not wait(sentinels, timeout=1.0):
        pass
    shutil.rmtree(seat.directory, ignore_errors=True)
    os._exit(1)


def _join_group(seat: Seat) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    file = os.path.join(seat.directory, "store")
    store = dist.FileStore(file, seat.world_size)  # type: ignore[attr-defined]  # documented, but not in an __all__
    # All are here before the group's own timeout begins to count: it may be shorter than an import of torch.
    store.set(f"arrived/{seat.rank}", "")
    store.wait([f"arrived/{rank}" for rank in range(seat.world_size)], timedelta(seconds=START_S))
    timeout = timedelta(seconds=seat.timeout)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world_size, timeout=timeout)


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def _loaded(call: Call) -> Callable[[], object]:
    def run() -> object:
        sys.path.extend(entry for entry in call.path if entry not in sys.path)
        for name, file in call.modules.items():
            _import(name, file)
        function, args, kwargs = pickle.loads(call.payload)
        return function(*args, **kwargs)

    return run


def _import(name: str, file: str | None) -> None:
    """Imports a module by name, or, where that is not to be found or is another one, from its file.

    pytest gives test modules names such as ``tests.ops.test_x``, by which nobody else can import them.
    """
    if name in sys.modules or file is None:
        return
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is not None and found.origin == file:
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"rank pool: module {name!r} of the sent function cannot be loaded from {file}", name=name)
    parts = name.split(".")
    for depth in range(1, len(parts)):  # as pytest does: pickle looks a module up by way of its first package
        package = ".".join(parts[:depth])
        sys.modules.setdefault(package, ModuleType(package))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _answer(function: Callable[[], object]) -> bytes:
    """What ``function`` returns or raises, ready to send. Its exit and its interrupt are failures like others."""
    answer: Answer
    try:
        answer = Returned(pickle.dumps(function()), _in_group())
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        answer = Raised(summary, "".join(traceback.format_exception(error)), _whole(error), _in_group())
    return pickle.dumps(answer)


def _in_group() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def _whole(error: BaseException) -> bytes | None:
    """``error`` in pickle, or None if it would not come back as what it is."""
    try:
        payload = pickle.dumps(error)
        return payload if type(pickle.loads(payload)) is type(error) else None
    except Exception:
        return None
