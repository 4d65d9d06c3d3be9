"""SGLang's engine in a process of its own, and how the trainer's process speaks to it.

``sglang.Engine`` takes over the process that makes it: it sets about 18 environment variables, the start method of
``multiprocessing`` and handlers for SIGQUIT and SIGTERM, its ``shutdown`` ends every child of that process, and an
exception in its scheduler kills the process itself. None of that may happen to a trainer. So it runs behind one pipe,
in a session of its own; when it dies, the trainer gets an ``EngineError``, and when the trainer is gone, it leaves.

Nothing of a trainer's script is run there: the process is not forked or spawned by ``multiprocessing``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, cast

import torch
from attrs import define, frozen
from torch import Tensor

import lightrft
from lightrft.errors import EngineError

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine, Generated

IDLE_S = 30.0
"""Seconds for what is running to end before memory is released."""
STOP_S = 20.0
"""Seconds for the process to leave by itself."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says of the trainer's rank, which is no business of the engine's own process group."""

ENVIRONMENT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
"""SGLang keeps some positions of its limit back: it is told a larger one than the model's, which no request ever uses."""

# ------------------------------------------------------------------------------------------------------ what is said


@frozen
class Packed:
    """Tensors one behind another in one buffer: a single thing to send. On the CPU as bytes, else on their device."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    buffer: bytes | Tensor


@frozen
class Generate:
    """One completion for each row of ``input_ids``."""

    input_ids: Sequence[Sequence[int]]
    sampling_params: Sequence[Mapping[str, object]]
    return_logprob: bool


@frozen
class Begin:
    """Opens an update of the weights, where this SGLang has such sessions."""


@frozen
class Update:
    """Some weights of it."""

    weights: Packed


@frozen
class End:
    """Closes it."""


@frozen
class Flush:
    """Forgets cached prefixes."""


@frozen
class Release:
    """Gives memory back, once nothing is running."""


@frozen
class Resume:
    """Takes it again: ``weights`` or ``kv_cache``."""

    tag: str


Message = Generate | Begin | Update | End | Flush | Release | Resume


@frozen
class Output:
    """One completion, as SGLang gives it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish: str
    text: str = ""
    """Why, where ``finish`` is "abort"."""


@frozen
class Ready:
    """The engine is up."""

    version: str
    has_sessions: bool
    """Whether an update has a beginning and an end there."""


@frozen
class Refused:
    """It could not: ``text`` says why."""

    text: str


def pack(named_tensors: Sequence[tuple[str, Tensor]]) -> Packed:
    """A copy of the tensors."""
    flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in named_tensors])
    return Packed(
        tuple(name for name, _ in named_tensors),
        tuple(tensor.dtype for _, tensor in named_tensors),
        tuple(tuple(tensor.shape) for _, tensor in named_tensors),
        flat if flat.is_cuda else flat.numpy().tobytes(),
    )


def unpack(packed: Packed) -> list[tuple[str, Tensor]]:
    """Tensors of this process, as were packed: aligned, and memory of a device that may be passed on."""
    flat = packed.buffer
    if not isinstance(flat, Tensor):  # torch makes no tensor of an empty buffer
        flat = torch.frombuffer(bytearray(flat), dtype=torch.uint8) if flat else torch.empty(0, dtype=torch.uint8)
    tensors, place = [], 0
    for name, dtype, shape in zip(packed.names, packed.dtypes, packed.shapes, strict=True):
        size = dtype.itemsize * torch.Size(shape).numel()
        tensors.append((name, flat[place : place + size].clone().view(dtype).reshape(shape)))
        place += size
    return tensors


# ------------------------------------------------------------------------------------------------ the trainer's side


@define(eq=False)
class Host:
    """The engine's process, as the trainer sees it."""

    process: subprocess.Popen[bytes]
    connection: Connection
    ready: Ready = Ready("", True)


def start(arguments: Mapping[str, object]) -> Host:
    """Starts the process and waits until ``sglang.Engine(**arguments)`` is up. Raises ``EngineError`` if it does not come."""
    ours, theirs = Pipe()
    package = str(Path(lightrft.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER and not name.startswith("TORCHELASTIC_")
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", f"import {__name__} as host; host.main({theirs.fileno()})"],
        pass_fds=(theirs.fileno(),),
        env={**environment, **ENVIRONMENT, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the trainer's
    )
    theirs.close()
    host = Host(process, ours)
    host.ready = cast("Ready", _exchange(host, arguments, "could not start"))
    return host


def ask(host: Host, message: Message) -> object:
    """What the engine answers. Raises ``EngineError`` for what it refuses, and once its process is gone."""
    return _exchange(host, message, f"could not do {type(message).__name__.lower()}")


def stop(host: Host) -> None:
    """Ends the process and all of its own; a second call is harmless."""
    host.connection.close()
    try:
        host.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Whatever is left of its session. The number is its own until it was waited for and the group is empty.
        with suppress(ProcessLookupError):
            os.killpg(host.process.pid, signal.SIGKILL)
        host.process.wait()


def _exchange(host: Host, message: object, failure: str) -> object:
    if host.connection.closed:
        raise EngineError("engine 'sglang' is closed. Set it up anew with strategy.setup_inference_engine.")
    try:
        host.connection.send(message)
        answer = host.connection.recv()
    except (EOFError, OSError) as error:
        stop(host)
        raise EngineError(
            f"engine 'sglang' {failure}: its process ended with exit code {host.process.returncode}; what it wrote to "
            f"stderr says why. Set it up anew with strategy.setup_inference_engine."
        ) from error
    except BaseException:  # an answer that was not waited for would be taken for that to the next question
        stop(host)
        raise
    if isinstance(answer, Refused):
        raise EngineError(f"engine 'sglang' {failure}: {answer.text}")
    return answer


# ------------------------------------------------------------------------------------------------- the engine's side


def main(descriptor: int) -> None:
    """Serves one trainer until it closes its end of the pipe, however it goes."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.version import __version__

    with Connection(descriptor) as connection, suppress(EOFError, OSError):
        try:
            engine = Engine(**connection.recv())
        except Exception as error:
            connection.send(Refused(f"{type(error).__name__}: {error}"))
            return
        try:
            connection.send(Ready(__version__, hasattr(engine, "begin_weight_update")))
            while True:
                message = connection.recv()
                try:
                    answer = carry_out(engine, message)
                except Exception as error:
                    answer = Refused(f"{type(error).__name__}: {error}")
                connection.send(answer)
        finally:
            engine.shutdown()


def carry_out(engine: Engine, message: Message) -> object:
    """The answer to one message."""
    match message:
        case Generate(input_ids, sampling_params, return_logprob):
            generated = engine.generate(
                input_ids=[list(row) for row in input_ids],
                sampling_params=[dict(row) for row in sampling_params],
                return_logprob=return_logprob,
            )
            return [output(one, return_logprob) for one in generated]
        case Begin():
            accept(engine.begin_weight_update())
        case Update(weights):
            accept(engine.update_weights_from_tensor(unpack(weights), flush_cache=False))
        case End():
            accept(engine.end_weight_update())
        case Flush():
            flush(engine)
        case Release():
            flush(engine)  # releasing while anything still runs takes the engine down
            engine.release_memory_occupation()
        case Resume(tag):
            engine.resume_memory_occupation(tags=[tag])
    return None


def output(generated: Generated, with_logprobs: bool) -> Output:
    """Without SGLang's dictionaries."""
    meta = generated["meta_info"]
    finish = meta["finish_reason"]
    logprobs = tuple(float(logprob) for logprob, *_ in meta["output_token_logprobs"]) if with_logprobs else None
    return Output(tuple(map(int, generated["output_ids"])), logprobs, finish["type"], str(finish.get("message", "")))


def accept(answer: tuple[bool, str]) -> None:
    """SGLang answers a weight update with whether it was done and a text, and raises nothing."""
    done, text = answer
    if not done:
        raise RuntimeError(text)


def flush(engine: Engine, patience_s: float = IDLE_S) -> None:
    """Empties the prefix cache, which works once nothing is running: just after a generate it may take some tries."""
    deadline = monotonic() + patience_s
    while not engine.flush_cache().success:
        if monotonic() > deadline:
            raise TimeoutError(f"the cache could not be emptied within {patience_s:.0f} s: requests are still running")
