"""What disks, people and enemies do to checkpoints (K4, K6, K9): an error that says where and why, and nothing else changes."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrft import StrategyConfig
from lightrft.backends import local
from lightrft.checkpoints.layout import damage, find_checkpoint, list_checkpoints, read_manifest, write_checkpoint
from lightrft.errors import CheckpointError
from lightrft.strategy.record import StrategyRecord

FILES = (
    "manifest.json",
    "model.safetensors",
    "optimizer.json",
    "optimizer.safetensors",
    "scheduler.json",
    "rng_rank0.json",
    "rng_rank0.safetensors",
    "client_state.json",
    "client_state.safetensors",
    "counters.json",
)


class Net(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


@frozen(eq=False)
class Run:
    """A strategy that has trained for some steps, and all that a load could change."""

    strategy: StrategyRecord
    model: nn.Module
    optimizer: Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def save(self, root: Path, tag: str) -> None:
        self.strategy.save_ckpt(self.model, root, tag=tag, client_state={"ema": torch.ones(3), "tag": tag})

    def load(self, root: Path, tag: str | None = None) -> str:
        return Path(self.strategy.load_ckpt(self.model, root, tag=tag)[0]).name

    def step(self) -> None:
        self.strategy.backward(self.model(torch.randn(2, 4)).square().mean(), self.model, self.optimizer)
        self.strategy.optimizer_step(self.optimizer, self.model, self.scheduler)

    def memory(self) -> dict[str, object]:
        """Copies."""
        return deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state(),
                "python": random.getstate(),
            }
        )


def started(width: int = 6) -> Run:
    strategy = local.build(StrategyConfig.from_args({"bf16": False, "train_batch_size": 1, "seed": 5}))
    strategy.setup_distributed()
    model = Net(width)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    run = Run(strategy, *strategy.prepare((model, optimizer, warm_up)))
    run.step()
    return run


def same(one: object, other: object) -> bool:
    """Bitwise."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture
def run() -> Iterator[Run]:
    run = started()
    yield run
    run.strategy.close()


@pytest.fixture
def root(run: Run, tmp_path: Path) -> Path:
    """Checkpoints ``old`` and ``new``; the run has gone on since."""
    root = tmp_path / "ckpts"
    run.save(root, "old")
    run.step()
    run.save(root, "new")
    run.step()
    assert sorted(read_manifest(root / "new").files) == sorted(set(FILES) - {"manifest.json"})
    return root


@contextmanager
def untouched(run: Run, root: Path, *whole: str) -> Iterator[None]:
    """Inside nothing in memory changes, neither does any of the checkpoints ``whole``, and no debris is left."""
    before, files = run.memory(), {tag: read_manifest(root / tag) for tag in whole}
    yield
    assert same(before, run.memory())
    for tag in whole:
        assert damage(root / tag) == ()
        assert read_manifest(root / tag) == files[tag]
    assert not [path.name for path in root.iterdir() if path.name.startswith((".tmp-", ".old-"))]


# --------------------------------------------------------------------------------------------------------- the disk


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_K4_FC26_no_room_for_a_file_is_an_error_that_leaves_the_old_ones(run: Run, root: Path) -> None:
    sizes = sorted({entry.size for entry in read_manifest(root / "new").files.values()})
    for size in sizes:
        for tag in ("new", "next"):
            with (
                untouched(run, root, "old", "new"),
                largest_file(size - 1),
                pytest.raises(CheckpointError, match=rf"{root}.*File too large"),
            ):
                run.save(root, tag)
            assert (root / "latest").read_text() == "new"
    run.save(root, "next")
    assert run.load(root) == "next"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 256 KiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill_up(disk: Path, leave: int) -> Path:
    """A file that takes all of ``disk`` but ``leave`` blocks."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    os.truncate(ballast, max(ballast.stat().st_size // 4096 - leave, 0) * 4096)
    return ballast


def test_K4_FC26_a_full_disk_is_an_error_that_leaves_the_old_ones(run: Run, small_disk: Path) -> None:
    root = small_disk / "ckpts"
    run.save(root, "old")
    run.save(root, "new")
    for blocks in range(8):
        for tag in ("new", "next"):
            ballast = fill_up(small_disk, leave=blocks)
            with (
                untouched(run, root, "old", "new"),
                pytest.raises(CheckpointError, match=rf"{root}/{tag}.*No space left.*Free some space"),
            ):
                run.save(root, tag)
            ballast.unlink()
            assert run.load(root) == "new"
    run.save(root, "next")
    assert run.load(root) == "next"
    assert sorted(found.path.name for found in list_checkpoints(root)) == ["new", "next", "old"]


def test_K4_a_directory_that_is_read_only_is_an_error_and_can_be_loaded_from(run: Run, small_disk: Path) -> None:
    root = small_disk / "ckpts"
    run.save(root, "old")
    run.strategy.close()  # a file that is open for writing keeps the file system as it is
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for directory in (root, small_disk / "another"):
        with untouched(run, root, "old"), pytest.raises(CheckpointError, match=rf"{directory}.*Read-only file system"):
            run.save(directory, "new")
    assert run.load(root) == "old"


# ------------------------------------------------------------------------------------------------------ damaged files


def flip(file: Path, position: int, bit: int = 0) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.parametrize("name", FILES)
def test_K6_a_flipped_bit_in_any_file_is_noticed(run: Run, root: Path, name: str) -> None:
    file = root / "new" / name
    size, draw = file.stat().st_size, random.Random(name)
    for position in (0, size // 2, size - 1, *(draw.randrange(size) for _ in range(5))):
        flip(file, position, bit := draw.randrange(8))
        with untouched(run, root, "old"), pytest.raises(CheckpointError, match=rf"(?s){root}/new.*{file}"):
            run.load(root, "new")
        flip(file, position, bit)
    flip(file, size // 3)
    assert run.load(root) == "old"


@pytest.mark.parametrize("name", FILES)
def test_K6_a_missing_or_shortened_file_is_noticed(run: Run, root: Path, name: str) -> None:
    file = root / "new" / name
    data = file.read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with untouched(run, root, "old"), pytest.raises(CheckpointError, match=rf"(?s){root}/new.*{name}"):
            run.load(root, "new")
    file.unlink()
    with untouched(run, root, "old"), pytest.raises(CheckpointError, match=rf"(?s){root}/new.*{name}"):
        run.load(root, "new")
    assert run.load(root) == "old"


def forged(root: Path, change: Callable[[Path], None]) -> None:
    """A checkpoint ``forged``: ``new`` after ``change``, with a manifest that says so."""

    def write(directory: Path) -> None:
        for name in FILES[1:]:
            shutil.copy(root / "new" / name, directory / name)
        change(directory)

    write_checkpoint(root, "forged", write, backend="local", world_size=1, step=2)
    assert damage(root / "forged") == ()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.json", "optimizer.safetensors"])
def test_K6_K7_a_file_of_another_model_is_refused(run: Run, root: Path, tmp_path: Path, name: str) -> None:
    other = started(width=7)
    other.save(tmp_path / "other", "other")
    stranger = tmp_path / "other" / "other" / name
    if stranger.suffix == ".json":  # the names are the same: of another optimizer
        stranger.write_text(stranger.read_text().replace("AdamW", "SGD"))

    def swap(directory: Path) -> None:
        shutil.copy(stranger, directory / name)

    forged(root, swap)
    with untouched(run, root, "old", "new"), pytest.raises(CheckpointError, match=r"(?s)forged/(model|optimizer)\..*"):
        run.load(root, "forged")
    assert run.load(root, "new") == "new"
    shutil.copy(stranger, root / "new" / name)
    with untouched(run, root, "old"), pytest.raises(CheckpointError, match=rf"new/{name}"):
        run.load(root, "new")
    assert run.load(root, "old") == "old"


# ----------------------------------------------------------------------------------------------------------- enemies


@frozen
class Bomb:
    """Makes a file wherever it is unpickled."""

    crater: Path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.crater,)


def test_the_bomb_is_live(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "crater")))
    assert (tmp_path / "crater").exists()


def test_K9_FC30_a_bomb_as_client_state_is_refused(run: Run, root: Path, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "crater")
    array = np.empty(1, dtype=object)
    array[0] = bomb
    parts: list[tuple[dict[str, object], str]] = [
        ({"a": bomb}, r"client_state\['a'\]"),
        ({"a": [1, {"b": (bomb,)}]}, r"client_state\['a'\]\[1\]\['b'\]\[0\]"),
        ({"a": array}, r"client_state\['a'\]"),
        ({"a": {bomb: 1}}, r"client_state\['a'\]"),
        ({"a": bomb.__reduce__}, r"client_state\['a'\]"),
    ]
    for client_state, where in parts:
        with untouched(run, root, "old", "new"), pytest.raises(TypeError, match=where):
            run.strategy.save_ckpt(run.model, root, tag="bomb", client_state=client_state)
    assert not (root / "bomb").exists()
    assert not bomb.crater.exists()


@pytest.mark.parametrize("form", ["pickle", "torch"])
@pytest.mark.parametrize("name", FILES[1:])
def test_K9_a_bomb_in_the_place_of_a_file_is_refused(
    run: Run, root: Path, tmp_path: Path, name: str, form: str
) -> None:
    bomb = Bomb(tmp_path / "crater")

    def plant(directory: Path) -> None:
        if form == "torch":
            torch.save({"weight": bomb}, directory / name)
        else:
            (directory / name).write_bytes(pickle.dumps(bomb))

    forged(root, plant)
    with untouched(run, root, "old", "new"), pytest.raises(CheckpointError, match=f"forged/{name}"):
        run.load(root, "forged")
    assert not bomb.crater.exists()
    assert run.load(root, "new") == "new"


@pytest.mark.parametrize(
    "tag", ["../evil", "/abs", "a/../../b", "", "a\0b", "..", ".", ".hidden", "a/b", "a\\b", "a\n", "latest"]
)
def test_K9_FC31_a_tag_that_leaves_the_directory_is_refused(run: Run, root: Path, tmp_path: Path, tag: str) -> None:
    before = sorted(map(str, tmp_path.rglob("*")))
    for attempt in (lambda: run.save(root, tag), lambda: run.load(root, tag)):
        with untouched(run, root, "old", "new"), pytest.raises(CheckpointError, match="tag"):
            attempt()
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_K9_FC31_a_latest_that_leaves_the_directory_is_refused(run: Run, root: Path, tmp_path: Path) -> None:
    run.save(tmp_path, "x")
    for text in ("../x", str(tmp_path / "x"), "a/../../x", "..", "\0"):
        (root / "latest").write_text(text)
        with untouched(run, root, "old", "new"), pytest.raises(CheckpointError, match=f"{root}/latest"):
            run.load(root)
    assert run.load(root, "new") == "new"
    run.save(root, "next")
    assert find_checkpoint(root) == root / "next"
    assert damage(tmp_path / "x") == ()


def test_K9_a_manifest_of_an_enemy_cannot_point_elsewhere(run: Run, root: Path, tmp_path: Path) -> None:
    """A link in the place of a file, and one in the place of the checkpoint."""
    file = root / "new" / "model.safetensors"
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with untouched(run, root, "old"), pytest.raises(CheckpointError, match=f"{file} is missing"):
        run.load(root, "new")
    body = json.loads((root / "new" / "manifest.json").read_text())
    assert "model.safetensors" in body["files"]
    (root / "linked").symlink_to(root / "old")
    with pytest.raises(CheckpointError, match="a file or link has that name"):
        run.save(root, "linked")
    assert "linked" not in [found.path.name for found in list_checkpoints(root)]
