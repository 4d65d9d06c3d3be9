"""W processes, started once and kept: a test sends a function, every rank runs it, results or exceptions come back.

    with rank_pool(2) as pool:
        assert pool.run(sum_over_ranks, 3) == [6, 6]

Parent and rank speak plain pickle over one pipe a rank. What may go wrong, and what then happens:

- Ranks raise. Where all of them raised one type, ``run`` raises that exception of the lowest of them, with a note that
  holds every rank's traceback: ``pytest.raises(ValueError)`` works as without the pool. Otherwise, or where the exception
  does not survive pickle, it raises ``RankFailure``.
- A rank ends, or does not answer in time. ``run`` raises ``RankFailure``, which shows where the silent ones stood, unless
  other ranks raised first: those that wait for a rank that raised are its victims, and its exception is the news.
- Once a rank failed, the others have ``GRACE_S`` seconds to answer too. If all do and a barrier shows that their process
  group is in step, they serve on. If not, all are killed, and the next run starts new ones.

Every rank watches its parent: when that is gone, however it went, the rank removes the pool's directory and leaves.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from attrs import define, field

from lightrft.conformance.rank import (
    START_S,
    Answer,
    Call,
    Ended,
    InStep,
    Outcome,
    Raised,
    Returned,
    Seat,
    Silent,
    Stop,
    serve,
    stacks_file,
)

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

P = ParamSpec("P")
R = TypeVar("R")

GRACE_S = 2.0
"""Seconds that the other ranks have to answer after the first one failed."""
IN_STEP_S = 2.0
"""Seconds for the barrier after a failure."""
STACKS_S = 1.0
"""Seconds to wait for a silent rank to write where it stands."""
STOP_S = 10.0
"""Seconds for ranks to leave by themselves."""

_log = logging.getLogger("lightrft.conformance")


class RankFailure(RuntimeError):
    """Ranks failed in a way that no single exception tells: the text has a line for each rank, then the tracebacks.

    ``__cause__`` is the exception of the lowest rank that raised, if it survives pickle. ``hung`` are the ranks that gave
    no answer in time.
    """

    hung: tuple[int, ...] = ()


@define(eq=False)
class Crew:
    """The processes of a pool while they live."""

    directory: str
    processes: list[SpawnProcess] = field(factory=list)
    pipes: list[Connection] = field(factory=list)


@define(eq=False)
class RankPool:
    """See :func:`rank_pool`. Not thread-safe: one run at a time."""

    world_size: int
    timeout: float
    environ: Mapping[str, str]
    output: Path | None = None
    _crew: Crew | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """``function(*args, **kwargs)`` of every rank, in rank order, each within the pool's timeout.

        Function, arguments, results must pickle: the function stands at the top of a module, else ``TypeError``. Raises
        what the ranks raised, or ``RankFailure``; see the module for which.
        """
        return self.run_within(self.timeout, function, *args, **kwargs)

    def run_within(self, seconds: float, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """``run`` with a time limit of its own. Starting the ranks, where they have to be, does not count."""
        call = pickle.dumps(_call(function, args, kwargs))
        crew = self._started()
        try:
            outcomes = _ask(crew, call, seconds)
            if any(isinstance(outcome, Ended | Silent) or not outcome.in_group for outcome in outcomes):
                self._kill()
            elif any(isinstance(outcome, Raised) for outcome in outcomes):
                checks = _ask(crew, pickle.dumps(InStep()), IN_STEP_S)
                if not all(isinstance(check, Returned) for check in checks):
                    self._kill()
        except (
            BaseException
        ):  # an interrupt, say: the answers that are still to come would be taken for those of the next run
            self._kill()
            raise
        if all(isinstance(outcome, Returned) for outcome in outcomes):
            return [cast("R", pickle.loads(outcome.payload)) for outcome in outcomes if isinstance(outcome, Returned)]
        raise _failure(f"{getattr(function, '__qualname__', function)} in a rank pool", outcomes)

    def pids(self) -> list[int]:
        """The processes that live, in rank order: none before the first run and after ``close``."""
        return [] if self._crew is None else [process.pid or 0 for process in self._crew.processes]

    def close(self) -> None:
        """Lets the ranks leave their process group and end; kills those that do not. A later run starts new ones."""
        if self._crew is not None:
            for pipe in self._crew.pipes:
                _send(pipe, pickle.dumps(Stop()))
            deadline = time.monotonic() + STOP_S
            for process in self._crew.processes:
                process.join(max(0.0, deadline - time.monotonic()))
            self._kill()

    def _started(self) -> Crew:
        if self._crew is None:
            atexit.register(self.close)
            self._crew = crew = Crew(tempfile.mkdtemp(prefix="lightrft-pool-"))
            try:
                _start(crew, self.world_size, self.timeout, self.environ, self.output)
                outcomes = _collect(crew, {}, START_S)
            except BaseException:
                self._kill()
                raise
            if not all(isinstance(outcome, Returned) for outcome in outcomes):
                self._kill()
                raise _failure("the start of a rank pool", outcomes)
            _log.debug("rank pool: %d ranks started, pids %s", self.world_size, self.pids())
        return self._crew

    def _kill(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            for process in crew.processes:
                process.kill()
            for process, pipe in zip(crew.processes, crew.pipes, strict=True):
                process.join()
                process.close()
                pipe.close()
            shutil.rmtree(crew.directory, ignore_errors=True)
            atexit.unregister(self.close)


def rank_pool(
    world_size: int, *, timeout: float = 60.0, environ: Mapping[str, str] | None = None, output: Path | None = None
) -> RankPool:
    """A pool of ``world_size`` processes in one gloo process group: a context manager that starts them at the first run.

    ``timeout``: seconds for a run, and for a collective of the process group. ``environ`` is added to each rank's
    environment, beside RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, before torch is imported. Each rank computes in
    one thread. ``output``: a file to which ranks append what they would write to the terminal. What a run leaves behind in
    a process (modules, environment) the next run finds. In a script, make the pool under ``if __name__ == "__main__"``:
    ranks start by spawn.
    """
    if world_size < 1:
        raise ValueError(f"a rank pool needs at least one rank, and world_size is {world_size}")
    if timeout <= 0:
        raise ValueError(f"the timeout of a rank pool is a number of seconds above 0, not {timeout}")
    return RankPool(world_size, timeout, dict(environ or {}), output)


def _start(crew: Crew, world_size: int, timeout: float, environ: Mapping[str, str], output: Path | None) -> None:
    context = get_context("spawn")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            file = None if output is None else str(output.absolute())
            seat = Seat(rank, world_size, timeout, crew.directory, os.getpid(), environ, file)
            process = context.Process(target=serve, args=(seat, theirs), name=f"lightrft-rank-{rank}")
            process.start()
            crew.processes.append(process)
            crew.pipes.append(ours)
            theirs.close()  # so that the pipe ends with the process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _call(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
    try:
        payload = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"a rank pool cannot send {getattr(function, '__qualname__', function)!r} with its arguments: {error}. Send a "
            "function from the top of a module, no lambda or closure, and what it needs as picklable arguments."
        ) from error
    modules = {module: _file(module) for module in map(_module, (function, *args, *kwargs.values()))}
    return Call(payload, modules, sys.path)


def _module(value: object) -> str:
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _file(module: str) -> str | None:
    # multiprocessing has its own way with the module that was started.
    return None if module == "__main__" else getattr(sys.modules.get(module), "__file__", None)


def _send(pipe: Connection, message: bytes) -> bool:
    try:
        pipe.send_bytes(message)
    except OSError:
        return False
    return True


def _ask(crew: Crew, message: bytes, seconds: float) -> list[Outcome]:
    """Sends ``message`` to every rank; what came of it, in rank order."""
    lost = [rank for rank, pipe in enumerate(crew.pipes) if not _send(pipe, message)]
    return _collect(crew, {rank: _ended(crew.processes[rank]) for rank in lost}, seconds)


def _collect(crew: Crew, known: Mapping[int, Outcome], seconds: float) -> list[Outcome]:
    outcomes = dict(known)
    failed = bool(outcomes)
    now = time.monotonic()
    deadline = min(now + seconds, now + GRACE_S) if failed else now + seconds
    why = f"gave no answer within {seconds:g} s"
    waiting = {pipe: rank for rank, pipe in enumerate(crew.pipes) if rank not in outcomes}
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
        for pipe in (pipe for pipe in list(waiting) if pipe in ready):
            rank = waiting.pop(pipe)
            try:
                outcome: Outcome = cast("Answer", pickle.loads(pipe.recv_bytes()))
            except (EOFError, ConnectionResetError):
                outcome = _ended(crew.processes[rank])
            outcomes[rank] = outcome
            grace_ends = time.monotonic() + GRACE_S
            if not failed and not isinstance(outcome, Returned) and grace_ends < deadline:
                deadline = grace_ends
                why = f"gave no answer within {GRACE_S:g} s after rank {rank} failed; it may be waiting for it"
            failed = failed or not isinstance(outcome, Returned)
    outcomes.update({rank: Silent(why, _stacks(crew, rank)) for rank in waiting.values()})
    return [outcomes[rank] for rank in range(len(crew.pipes))]


def _stacks(crew: Crew, rank: int) -> str:
    """Where the threads of a rank stand, but the one that watches the parent; empty if it does not say."""
    process, file = crew.processes[rank], Path(stacks_file(crew.directory, rank))
    if process.pid is None or not process.is_alive() or not file.exists():
        return ""
    os.kill(process.pid, signal.SIGUSR1)
    deadline, text = time.monotonic() + STACKS_S, ""
    # It is whole when the thread that Python started with has been written, which comes last.
    while time.monotonic() < deadline and "in <module>" not in text:
        time.sleep(0.02)
        text = file.read_text(errors="replace")
    threads = [thread for thread in text.strip().split("\n\n") if "_leave_with_parent" not in thread]
    return "\n\n".join(threads)


def _ended(process: SpawnProcess) -> Ended:
    process.join(STOP_S)
    return Ended(process.exitcode)


def _failure(what: str, outcomes: Sequence[Outcome]) -> BaseException:
    """The exception that tells these outcomes, of which not all are results."""
    raised = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Raised)}
    failed = sum(not isinstance(outcome, Returned) for outcome in outcomes)
    text = f"{what}: {failed} of {len(outcomes)} ranks failed"
    text += "".join(f"\n  - rank {rank} {_told(outcome)}" for rank, outcome in enumerate(outcomes))
    text += "".join(f"\n\nrank {rank}: {outcome.traceback.rstrip()}" for rank, outcome in raised.items())
    stacks = {rank: outcome.stacks for rank, outcome in enumerate(outcomes) if isinstance(outcome, Silent)}
    text += "".join(f"\n\nrank {rank} stood at:\n{stack}" for rank, stack in stacks.items() if stack)

    errors = [None if outcome.payload is None else _error(outcome.payload) for outcome in raised.values()]
    first = errors[0] if errors else None
    # A rank that ended may be why the others raised. And an exit of a rank must not end pytest.
    says_all = (
        not any(isinstance(outcome, Ended) for outcome in outcomes) and len({type(error) for error in errors}) == 1
    )
    if first is not None and says_all and not isinstance(first, (SystemExit, KeyboardInterrupt, GeneratorExit)):
        first.add_note(text)
        return first
    failure = RankFailure(text)
    failure.hung = tuple(stacks)
    failure.__cause__ = first
    return failure


def _told(outcome: Outcome) -> str:
    match outcome:
        case Returned(payload):
            return f"returned {short_repr(pickle.loads(payload))}"
        case Raised(summary):
            return f"raised {summary}"
        case Ended():
            return str(outcome)
        case Silent():
            return outcome.text


def _error(payload: bytes) -> BaseException:
    return cast("BaseException", pickle.loads(payload))
