"""The laws of checkpoints (K) that are about ranks: a resumed run is the run."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from lightrft.conformance.law import Law, Make
from lightrft.conformance.probes import furthest, refused, same, weights
from lightrft.errors import CheckpointError
from lightrft.strategy.protocol import Strategy

Run = tuple[Strategy, nn.Module, Optimizer, LRScheduler]


@contextmanager
def shared_directory(strategy: Strategy) -> Iterator[Path]:
    """A new directory, the same on all ranks of a machine."""
    name = tempfile.mkdtemp() if strategy.is_rank_0() else ""
    letters = strategy.broadcast(torch.tensor([ord(letter) for letter in name], dtype=torch.int64))
    path = Path("".join(chr(int(letter)) for letter in letters))
    try:
        yield path
        strategy.barrier()
    finally:
        if strategy.is_rank_0():
            for file in sorted(path.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            path.rmdir()


def begun(make: Make) -> Run:
    strategy = make(train_batch_size=2 * make().world_size, seed=3)
    with strategy.init_model_context():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = strategy.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=5)
    return strategy, *strategy.prepare((model, optimizer, warm_up))


def train(run: Run, first: int, steps: int) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Parameters, learning rates and this rank's random draws after so many updates."""
    strategy, model, optimizer, scheduler = run
    rates = []
    for step in range(first * 2, (first + steps) * 2):
        generator = torch.Generator().manual_seed(100 * step + strategy.get_rank())
        x, y = torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        rates.append(float(optimizer.param_groups[0]["lr"]))
    draws = [float(torch.rand(())), float(np.random.rand()), random.random()]
    return weights(strategy, model), rates, draws


def resumed_run_is_the_run(make: Make) -> None:
    whole = begun(make)
    train(whole, 0, 3)
    expected = train(whole, 3, 3)
    start = begun(make)
    train(start, 0, 3)
    with shared_directory(start[0]) as directory:
        start[0].save_ckpt(start[1], directory, client_state={"seen": [1, 2], "mine": torch.ones(2)})
        torch.rand(5)  # the state of randomness is the checkpoint's, not this process's
        again = begun(make)
        path, client_state = again[0].load_ckpt(again[1], directory)
    assert Path(path).name == "step3"
    assert client_state["seen"] == [1, 2]
    found = train(again, 3, 3)
    assert same(found[0], expected[0]), f"parameters differ by {furthest(found[0], expected[0])}"
    assert found[1] == expected[1], "learning rates differ"
    assert found[2] == expected[2], "random numbers differ"
    draws = start[0].all_gather(found[2][0])
    assert len(set(draws)) == len(draws), "one rank's random state was given to all"


def weights_alone(make: Make) -> None:
    run = begun(make)
    train(run, 0, 2)
    with shared_directory(run[0]) as directory:
        run[0].save_ckpt(run[1], directory, tag="a")
        run[0].save_model(run[1], None, directory / "model")
        saved = weights(run[0], run[1])
        train(run, 2, 1)
        run[0].load_ckpt(run[1], directory, tag="a", load_module_only=True)
        assert same(saved, weights(run[0], run[1]))
        train(run, 3, 1)
        run[0].load_model(run[1], directory / "model", strict=True)
        assert same(saved, weights(run[0], run[1]))
        refused(CheckpointError, "nothing", lambda: run[0].load_ckpt(run[1], directory / "nothing"))
        refused(CheckpointError, "", lambda: run[0].save_ckpt(run[1], directory, tag="../x"))
        assert not (directory.parent / "x").exists()
        assert same(saved, weights(run[0], run[1]))


LAWS = (
    Law("K1 K2 FC28 FC29: a resumed run is the run, each rank with its own random numbers", resumed_run_is_the_run),
    Law("K6 K7 K9 FC31: weights alone, and what cannot be loaded or saved", weights_alone),
)
