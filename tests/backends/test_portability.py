"""K3: a checkpoint of any backend, at any number of ranks, goes on in any other, with the numbers of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn.functional import mse_loss

from lightrft.backends import deepspeed, fsdp, local
from lightrft.conformance.checkpoints import portable_resume, portable_save
from lightrft.conformance.law import Target, run_body
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.conformance.probes import batch, furthest, mlp, trained_by_torch

RUNS = (
    Target(name="local", build=local.build),
    Target(name="fsdp-W1", build=fsdp.build),
    Target(name="fsdp-W2", build=fsdp.build, world_size=2),
    Target(name="ZeRO0-W2", build=deepspeed.build, world_size=2, fields={"zero_stage": 0}),
    Target(name="ZeRO1-W1", build=deepspeed.build, fields={"zero_stage": 1}),
    Target(name="ZeRO2-W2", build=deepspeed.build, world_size=2, fields={"zero_stage": 2}),
    Target(name="ZeRO3-W1", build=deepspeed.build, fields={"zero_stage": 3}),
    Target(name="ZeRO3-W2", build=deepspeed.build, world_size=2, fields={"zero_stage": 3}),
)
pytestmark = pytest.mark.backends


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with ExitStack() as stack:
        yield {size: stack.enter_context(rank_pool(size, timeout=120.0)) for size in (1, 2)}


@pytest.fixture(scope="module")
def saved(pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint by each."""
    directories = {}
    for run in RUNS:
        directories[run.name] = tmp_path_factory.mktemp(run.name)
        values = {"directory": directories[run.name]}
        pools[run.world_size].run(run_body, run.build, run.fields, portable_save, values)
    return directories


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Tensor]:
    """Five updates by torch in one process."""
    batches = [batch(4, seed) for seed in range(5)]
    losses = [lambda model, data=data: mse_loss(model(data[0]), data[1]) for data in batches]
    return trained_by_torch(mlp(), losses, lr=1e-2, weight_decay=0.1)[0]


@pytest.mark.parametrize("second", RUNS, ids=lambda run: run.name)
@pytest.mark.parametrize("first", RUNS, ids=lambda run: run.name)
def test_K3_saved_by_one_loaded_by_another(
    pools: dict[int, RankPool], saved: dict[str, Path], uninterrupted: dict[str, Tensor], first: Target, second: Target
) -> None:
    values = {"directory": saved[first.name]}
    for found in pools[second.world_size].run(run_body, second.build, second.fields, portable_resume, values):
        assert furthest(found, uninterrupted) <= 1e-6
