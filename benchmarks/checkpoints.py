"""Saving and loading a model of 135 million parameters with its optimizer, against torch.save and raw DCP.

All write to one directory and take turns. Every side's files are on the disk, and hashed with SHA-256, when its turn ends;
every load begins with a new model and optimizer, and ends with both restored. Files are in the page cache when they are
read. Peak memory is measured in new processes.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, TypeAlias, cast

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from benchmarks.figures import Figure, paired_ratio, seconds
from lightrft import Strategy, StrategyConfig
from lightrft.backends.local import build
from lightrft.checkpoints.manifest import flush

SAVE_TARGET = 1.15
LOAD_TARGET = 1.0
"""Against torch.load and load_state_dict: after both, the model is restored."""
ASYNC_TARGET = 0.1
MEMORY_TARGET = 300e6
NEEDED_DISK = 8e9
VOCABULARY, WIDTH, INNER, KEYS, LAYERS = 49_152, 576, 1_536, 192, 30
MAPPED_FROM = 65_536

Side: TypeAlias = Literal["ours", "torch", "dcp"]
SIDES: tuple[Side, ...] = ("ours", "torch", "dcp")


@frozen(eq=False)
class Trainee:
    """What is saved, and restored."""

    strategy: Strategy
    model: nn.Module
    optimizer: torch.optim.Optimizer


def language_model() -> nn.Module:
    """The weights of SmolLM2-135M, their names and shapes; it cannot be run."""
    shapes = {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH)}
    shapes |= {"self_attn.k_proj": (WIDTH, KEYS), "self_attn.v_proj": (WIDTH, KEYS)}
    shapes |= {"mlp.gate_proj": (WIDTH, INNER), "mlp.up_proj": (WIDTH, INNER), "mlp.down_proj": (INNER, WIDTH)}

    def layer() -> nn.Module:
        parts: dict[str, nn.Module] = {
            name.replace(".", "_"): nn.Linear(into, out, bias=False) for name, (into, out) in shapes.items()
        }
        norms: dict[str, nn.Module] = {name: nn.RMSNorm(WIDTH) for name in ("input_norm", "attention_norm")}
        return nn.ModuleDict(parts | norms)

    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = embedding.weight
    layers = nn.ModuleList([layer() for _ in range(LAYERS)])
    return nn.ModuleDict({"embed": embedding, "layers": layers, "norm": nn.RMSNorm(WIDTH), "head": head})


def fresh(async_save: bool = False) -> Trainee:
    """As a run has it that is about to resume."""
    strategy = build(StrategyConfig(bf16=False, async_save=async_save))
    model, optimizer = strategy.prepare((made := language_model(), strategy.create_optimizer(made)))
    return Trainee(strategy, model, optimizer)


def trained(async_save: bool = False) -> Trainee:
    """After an update, with random gradients."""
    torch.manual_seed(0)
    trainee = fresh(async_save)
    for parameter in trainee.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    return trainee


# ------------------------------------------------------------------------------------------------------ the contenders


def save(side: Side, trainee: Trainee, directory: Path) -> None:
    """Writes all of it, waits for the disk, and leaves or computes a checksum of every file."""
    if side == "ours":
        trainee.strategy.save_ckpt(trainee.model, str(directory), tag="a", optimizer=trainee.optimizer)
        return
    state = {"model": trainee.model.state_dict(), "optimizer": trainee.optimizer.state_dict()}
    if side == "torch":
        directory.mkdir()
        torch.save(state, directory / "state.pt")
    else:
        save_dcp(state, checkpoint_id=directory, no_dist=True)
    for path in (*directory.iterdir(), directory):
        flush(path)
        if path.is_file():
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")


def load(side: Side, trainee: Trainee, directory: Path) -> None:
    """Restores all of it. Only ours verifies."""
    if side == "ours":
        trainee.strategy.load_ckpt(trainee.model, str(directory), optimizer=trainee.optimizer)
        return
    if side == "torch":
        state = read_by_torch(directory)
    else:
        # DCP reads into what is there: the optimizer needs a state of the same shapes before.
        for group in trainee.optimizer.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                trainee.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        state = {"model": trainee.model.state_dict(), "optimizer": trainee.optimizer.state_dict()}
        load_dcp(state, checkpoint_id=directory, no_dist=True)
    trainee.model.load_state_dict(state["model"])
    trainee.optimizer.load_state_dict(state["optimizer"])


def read_by_torch(directory: Path) -> dict[str, Any]:
    """What torch saved, in memory: ``load`` puts it in place."""
    content: dict[str, Any] = torch.load(directory / "state.pt", weights_only=True, mmap=False)
    return content


def same(mine: Trainee, theirs: Trainee) -> bool:
    """Whether weights and moments are, bitwise."""
    mine_p, theirs_p = list(mine.model.parameters()), list(theirs.model.parameters())
    weights = all(torch.equal(a, b) for a, b in zip(mine_p, theirs_p, strict=True))
    return weights and all(
        torch.equal(cast(Tensor, mine.optimizer.state[a][key]), cast(Tensor, theirs.optimizer.state[b][key]))
        for a, b in zip(mine_p, theirs_p, strict=True)
        for key in ("step", "exp_avg", "exp_avg_sq")
    )


@frozen
class Times:
    """Seconds of every turn, by side."""

    saves: dict[Side, list[float]]
    loads: dict[Side, list[float]]
    torch_load_alone: list[float]
    """Of the loads of torch, ``torch.load`` without what puts it in place."""


def take_turns(root: Path, rounds: int) -> Times:
    """In every round each side saves and loads once, in an order that turns."""
    times = Times({side: [] for side in SIDES}, {side: [] for side in SIDES}, [])
    source = trained()
    for turn in range(rounds + 1):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            saved, loaded = take_turn(side, source, root / side, compare=turn == 0)
            if turn:  # the first round warms up
                times.saves[side].append(saved)
                times.loads[side].append(loaded)
                if side == "torch":
                    times.torch_load_alone.append(seconds(lambda: read_by_torch(root / "torch")))
    return times


def take_turn(side: Side, source: Trainee, directory: Path, compare: bool) -> tuple[float, float]:
    """Seconds of one save and of one load."""
    target = fresh()
    # The pages that this frees are those that the next file takes: new ones may have to come from a hypervisor.
    shutil.rmtree(directory, ignore_errors=True)
    os.sync()
    saved = seconds(lambda: save(side, source, directory))
    loaded = seconds(lambda: load(side, target, directory))
    if compare and not same(source, target):
        raise RuntimeError(f"{side}: what was loaded is not what was saved")
    return saved, loaded


def blocked(root: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds that a save in the background keeps the caller, and those of a save in the foreground."""
    calls: list[float] = []
    waits: list[float] = []
    background, foreground = trained(async_save=True), trained()
    for turn in range(rounds + 1):
        call = seconds(lambda: save("ours", background, root / "background"))
        background.strategy.load_ckpt(background.model, str(root / "background"))  # it waits for the save
        wait = seconds(lambda: save("ours", foreground, root / "foreground"))
        if turn:  # the first save in the background allocates what the later ones use again
            calls.append(call)
            waits.append(wait)
    background.strategy.close()
    return calls, waits


# -------------------------------------------------------------------------------------------------------------- memory


@contextmanager
def watched(found: list[int]) -> Iterator[None]:
    """Appends the most anonymous memory that was resident in between, looked up every two milliseconds.

    Not VmHWM: that counts the pages of a mapped file, which are the page cache's and not this process's.
    """
    done = Event()

    def watch() -> None:
        peak = anonymous()
        while not done.wait(0.002):
            peak = max(peak, anonymous())
        found.append(max(peak, anonymous()))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def give_back_freed_memory() -> None:
    """glibc returns every freed block of some size at once: what is resident then is what is alive."""
    libc = ctypes.CDLL(None)
    for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        if not libc.mallopt(option, MAPPED_FROM):
            raise RuntimeError("mallopt was refused: peak memory is measured under glibc alone")


def peak_of_save(side: Side, directory: Path) -> int:
    """Bytes beyond what the model and its optimizer take."""
    give_back_freed_memory()
    trainee = trained()
    gc.collect()
    before, found = anonymous(), list[int]()
    with watched(found):
        save(side, trainee, directory)
    return found[0] - before


def peak_of_load(side: Side, directory: Path) -> int:
    """Bytes beyond what the model and its optimizer take when they are restored."""
    give_back_freed_memory()
    trainee, found = fresh(), list[int]()
    gc.collect()
    with watched(found):
        load(side, trainee, directory)
    gc.collect()
    return found[0] - anonymous()


def in_new_process(function: Callable[[Side, Path], int], side: Side, directory: Path) -> int:
    """What it returns there."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (side, directory))


# ------------------------------------------------------------------------------------------------------------- figures


def speed(what: str, times: dict[Side, list[float]], rival: Side, target: float | None, note: str) -> Figure:
    """Ours against a rival's."""
    named = {"ours": "", "torch": "torch.save / torch.load", "dcp": "raw DCP"}[rival]
    ratio = paired_ratio(times["ours"], times[rival])
    return Figure(
        name=f"{what}, 134.5 M parameters with AdamW, 1.6 GB (rival: {named})",
        ours=f"{statistics.median(times['ours']):.2f} s",
        rival=f"{statistics.median(times[rival]):.2f} s",
        ratio=ratio,
        target="" if target is None else f"<= {target}",
        met=None if target is None else ratio <= target,
        note=note,
    )


def memory(what: str, ours: int, rival: int) -> Figure:
    """Peak of ours beside that of torch."""
    return Figure(
        name=f"{what}, the same: peak extra memory (rival: torch.save / torch.load)",
        ours=f"{ours / 1e6:.0f} MB",
        rival=f"{rival / 1e6:.0f} MB",
        ratio=None,
        target=f"<= {MEMORY_TARGET / 1e6:.0f} MB",
        met=ours <= MEMORY_TARGET,
        note="anonymous memory, in new processes",
    )


def measure(rounds: int = 3) -> list[Figure]:
    """Speed of saving and loading, then memory."""
    with tempfile.TemporaryDirectory(prefix="lightrft-benchmark-") as directory:
        root = Path(directory)
        if (free := shutil.disk_usage(root).free) < NEEDED_DISK:
            raise RuntimeError(f"{root} has {free / 1e9:.1f} GB free, {NEEDED_DISK / 1e9:.0f} are needed. Set TMPDIR.")
        times = take_turns(root, rounds)
        for side in SIDES:
            shutil.rmtree(root / side)
        calls, waits = blocked(root, rounds)
        peaks = {
            side: (in_new_process(peak_of_save, side, root / side), in_new_process(peak_of_load, side, root / side))
            for side in ("ours", "torch")
        }
    alone = paired_ratio(times.loads["ours"], times.torch_load_alone)
    hashed = "both with SHA-256 and fsync"
    verified = f"ours verifies, the rival does not; against torch.load alone, nothing put in place: {alone:.3f}"
    return [
        speed("save_ckpt", times.saves, "torch", SAVE_TARGET, hashed),
        speed("save_ckpt", times.saves, "dcp", None, hashed),
        speed("load_ckpt", times.loads, "torch", LOAD_TARGET, verified),
        speed("load_ckpt", times.loads, "dcp", None, "ours verifies, the rival does not"),
        Figure(
            name="save_ckpt with async_save, the same: how long the caller waits (rival: save_ckpt without it)",
            ours=f"{statistics.median(calls):.2f} s",
            rival=f"{statistics.median(waits):.2f} s",
            ratio=(ratio := paired_ratio(calls, waits)),
            target=f"<= {ASYNC_TARGET}",
            met=ratio <= ASYNC_TARGET,
            note="the second and later saves: the first allocates the copy",
        ),
        memory("save_ckpt", peaks["ours"][0], peaks["torch"][0]),
        memory("load_ckpt", peaks["ours"][1], peaks["torch"][1]),
    ]
