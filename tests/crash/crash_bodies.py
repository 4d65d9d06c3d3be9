"""What test_crash.py kills. As a script: ``crash_bodies.py BACKEND DIRECTORY SEED KILLS``.

It imports everything once; each run that is to be killed is a fork of it, which saves into DIRECTORY until it is dead.
After each death it writes a line of JSON, :class:`Death`, and goes on when it has read a line.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attrs import asdict, frozen
from torch import nn

from lightrft import Strategy, get_strategy
from lightrft.checkpoints.layout import list_checkpoints

AUDITED = ("open", "os.", "shutil.", "fcntl.", "ctypes.")
"""The events of ``sys.addaudithook`` that are calls of the operating system."""
SAVES_MEASURED = 6
RANKS = {"local": 1, "fsdp": 2}
LONGEST_S = 60.0
MAX_NUM = 3


@frozen
class Death:
    """How a run died, and what it had said before."""

    how: str
    """``event 17``, counted from the first save that may be killed, or ``delay 0.0123``."""
    first_left: list[str]
    """What the first save, which nobody disturbs, has left in the directory."""
    in_save: bool
    tag: str
    """Of the last save, finished or not."""
    tags_before: list[str]
    """The checkpoints before that save, the last committed first."""
    latest_before: str


class Net(nn.Module):
    """Four blocks, each sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    """One number in all parameters and moments."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
        for state in optimizer.state.values():
            state["exp_avg"].fill_(value)


def trained(backend: str) -> tuple[Strategy, nn.Module, torch.optim.Optimizer]:
    strategy = get_strategy(
        {"backend": backend, "bf16": False, "micro_train_batch_size": 1, "train_batch_size": RANKS[backend]}
    )
    strategy.setup_distributed()
    model: nn.Module = Net()
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    model, optimizer = strategy.prepare((model, optimizer))
    strategy.backward(model(torch.ones(1, 96)), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    return strategy, model, optimizer


def save_for_ever(backend: str, root: Path, number: int, seed: int, note: int, arm: Callable[[], None]) -> None:
    """Saves again and again: ``begin`` and ``end`` of each go to ``note``. ``arm`` is called after the first."""
    strategy, model, optimizer = trained(backend)
    draw = random.Random(seed)  # every rank draws the same
    speaks = strategy.is_rank_0()

    def say(**facts: object) -> None:
        if speaks:
            os.write(note, json.dumps(facts).encode() + b"\n")

    for count in range(1000):
        value = number * 1000 + count
        fill(model, optimizer, value)
        known = ["a", "b"] if draw.random() < 0.4 else [f"step{value}"]
        tag = draw.choice(known)
        before = [found.manifest.tag for found in list_checkpoints(root)] if speaks else []
        latest = (root / "latest").read_text() if (root / "latest").exists() else ""
        say(what="begin", tag=tag, before=before, latest=latest, at=time.monotonic())
        strategy.save_ckpt(model, root, tag=tag, max_num=MAX_NUM, client_state={"value": value})
        say(what="end", at=time.monotonic(), left=sorted(path.name for path in root.iterdir()) if speaks else [])
        if count == 0:
            arm()


def count_events(stop_at: int, reached: Callable[[], None]) -> None:
    """Calls ``reached`` in the middle of what this process asks of its system for the ``stop_at``-th time."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event.startswith(AUDITED):
            seen += 1
            if seen == stop_at:
                reached()

    sys.addaudithook(hook)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------- the killer


@frozen
class Run:
    """The processes of a run, by rank, and where rank 0 says what it does."""

    pids: list[int]
    notes: int


def start(backend: str, root: Path, number: int, seed: int, arm: Callable[[], None]) -> Run:
    notes, note = os.pipe()
    pids: list[int] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for rank in range(RANKS[backend]):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(notes)
                os.close(0)
                os.dup2(2, 1)
                if RANKS[backend] > 1:
                    place = {"RANK": str(rank), "WORLD_SIZE": str(RANKS[backend]), "LOCAL_RANK": str(rank)}
                    os.environ.update(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
                save_for_ever(backend, root, number, seed, note, arm if rank == 0 else lambda: None)
            except BaseException as error:
                # The others only hear that rank 0 is dead.
                if rank == 0:
                    os.write(note, json.dumps({"what": "error", "text": repr(error)}).encode() + b"\n")
            finally:
                os._exit(1)
        pids.append(pid)
    os.close(note)
    return Run(pids, notes)


def read_notes(run: Run, enough: Callable[[list[dict[str, object]]], bool]) -> list[dict[str, object]]:
    """What rank 0 has said, until it is ``enough`` or rank 0 is dead."""
    text, deadline = b"", time.monotonic() + LONGEST_S
    while True:
        said: list[dict[str, object]] = [json.loads(line) for line in text.split(b"\n")[:-1]]
        errors = [facts["text"] for facts in said if facts["what"] == "error"]
        if errors:
            raise RuntimeError(f"a run failed by itself: {errors}")
        if enough(said):
            return said
        if not select.select([run.notes], [], [], deadline - time.monotonic())[0]:
            raise RuntimeError(f"a run does nothing any more: {said[-1:]}")
        more = os.read(run.notes, 65536)
        if not more:
            return said
        text += more


def end(run: Run) -> None:
    """Kills what is left of a run, rank 0 first."""
    for pid in run.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def measured(backend: str, root: Path) -> tuple[int, float]:
    """Calls of the system, and seconds, of one save."""
    counted = [0]
    where, told = os.pipe()

    def arm() -> None:
        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event.startswith(AUDITED):
                os.write(told, b".")

        sys.addaudithook(hook)

    run = start(backend, root, 0, 0, arm)
    said = read_notes(run, lambda said: len(said) >= 2 + 2 * SAVES_MEASURED)
    end(run)
    os.close(run.notes)
    os.close(told)
    while part := os.read(where, 65536):
        counted[0] += len(part)
    os.close(where)
    at = [float(str(facts["at"])) for facts in said[2 : 2 + 2 * SAVES_MEASURED]]
    seconds = sum(after - before for before, after in zip(at[::2], at[1::2], strict=True)) / SAVES_MEASURED
    return max(counted[0] // SAVES_MEASURED, 1), seconds


def kill_one(backend: str, root: Path, number: int, draw: random.Random, events: int, seconds: float) -> Death:
    seed = draw.randrange(2**31)
    if number % 2:
        stop_at = draw.randint(1, 2 * events)
        how = f"event {stop_at}"
        run = start(backend, root, number, seed, lambda: count_events(stop_at, kill_me))
        said = read_notes(run, lambda said: False)
        end(run)
    else:
        delay = draw.uniform(0, 3 * seconds)
        how = f"delay {delay:.4f}"
        run = start(backend, root, number, seed, lambda: None)
        said = read_notes(run, lambda said: len(said) >= 3)
        time.sleep(delay)
        end(run)
        said += read_notes(run, lambda said: False)
    os.close(run.notes)
    begun = [facts for facts in said if facts["what"] == "begin"][-1]
    return Death(
        how=how,
        first_left=said[1]["left"],  # type: ignore[arg-type]  # JSON of save_for_ever
        in_save=said[-1]["what"] == "begin",
        tag=str(begun["tag"]),
        tags_before=begun["before"],  # type: ignore[arg-type]  # JSON of save_for_ever
        latest_before=str(begun["latest"]),
    )


def warm_up(backend: str) -> None:
    """What the first strategy and the first optimizer of a process import, without the threads of a backward."""
    importlib.import_module(f"lightrft.backends.{backend}")
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.AdamW([parameter]).step()


def main(backend: str, directory: str, seed: str, kills: str) -> None:
    warm_up(backend)
    root, draw = Path(directory), random.Random(int(seed))
    root.mkdir()
    events, seconds = measured(backend, root)
    sys.stdout.write(json.dumps({"events": events, "seconds": seconds}) + "\n")
    sys.stdout.flush()
    for number in range(1, int(kills) + 1):
        if not sys.stdin.readline():
            return
        death = kill_one(backend, root, number, draw, events, seconds)
        sys.stdout.write(json.dumps(asdict(death)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
