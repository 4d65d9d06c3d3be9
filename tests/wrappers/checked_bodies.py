"""What the ranks of test_checked.py do: run as a script, one process a rank."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from lightrft.backends import local
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import AllReduce
from lightrft.strategy.record import StrategyRecord, evolve
from lightrft.wrappers import RankMismatch, checked

CALLS = 1000


@frozen
class Outcome:
    """What a scenario came to on one rank."""

    error: str | None
    seconds: float


Outcomes = dict[str, Outcome]
Scenario = Callable[[StrategyRecord, int], object]


def reduce_sum(data: Mapping[str, Tensor | float], op: str = "mean") -> dict[str, Tensor]:
    """Enough of ``all_reduce``: it hangs, or mixes values up, where ranks disagree."""
    reduced = {key: torch.as_tensor(value, dtype=torch.float64) for key, value in data.items()}
    for _, value in sorted(reduced.items()):
        dist.all_reduce(value)
    return reduced


def world_of(rank: int, world_size: int) -> StrategyRecord:
    """The local strategy, told that it is one of several; only what ranks meet in here is real."""
    alone = local.build(StrategyConfig.from_args({"bf16": False}))
    return evolve(
        alone,
        world_size=world_size,
        get_rank=lambda: rank,
        barrier=lambda: dist.barrier(),
        all_reduce=cast(AllReduce, reduce_sum),  # one signature for the overloads of the Protocol
    )


def outcome_of(scenario: Scenario, strategy: StrategyRecord, rank: int) -> Outcome:
    dist.barrier()
    start = time.monotonic()
    try:
        scenario(strategy, rank)
    except RankMismatch as mismatch:
        return Outcome(str(mismatch), time.monotonic() - start)
    return Outcome(None, time.monotonic() - start)


def same_calls(strategy: StrategyRecord, rank: int) -> None:
    strategy.all_gather({"x": torch.zeros(rank + 1)})
    strategy.barrier()
    total = strategy.all_reduce({"b": 1.0, "a": 2.0} if rank == 0 else {"a": 2.0, "b": 1.0}, "sum")
    assert total["a"] == 2.0 * strategy.world_size
    assert strategy.broadcast(3, src=0) == 3


def same_training(strategy: StrategyRecord, rank: int) -> None:
    model = nn.Linear(2, 1)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    model, optimizer = strategy.prepare((model, optimizer))
    strategy.backward(model(torch.ones(1, 2)).mean(), model, optimizer)
    strategy.optimizer_step(optimizer, model, name="actor", flush=True)
    strategy.get_grad_norm(model)


def numbers(strategy: StrategyRecord, rank: int) -> None:
    for other in (1.0, 1, True, np.float64(1), np.bool_(True)):
        mine = 1.0 if rank == 0 else other
        assert strategy.all_reduce({"x": cast(float, mine)}, "sum")["x"] == 2.0


def branch_on_rank(strategy: StrategyRecord, rank: int) -> None:
    if rank == 0:
        strategy.all_reduce({"loss": 1.0, "kl": torch.zeros(3)}, "sum")
    else:
        strategy.barrier()


def late(strategy: StrategyRecord, rank: int) -> None:
    """Rank 1 comes when rank 0 has given up, to an operation that needs nobody else."""
    model = nn.Linear(1, 1)
    if rank == 0:
        try:
            strategy.get_grad_norm(model)
        finally:
            dist.barrier()
    else:
        dist.barrier()
        strategy.get_grad_norm(model)


def closes(strategy: StrategyRecord, rank: int) -> None:
    if rank == 1:
        strategy.close()
        strategy.close()
    else:
        strategy.barrier()


def still_gone(strategy: StrategyRecord, rank: int) -> None:
    if rank == 0:
        strategy.barrier()


PAIR: Mapping[str, Scenario] = {
    "same": same_calls,
    "training": same_training,
    "numbers": numbers,
    "operations": branch_on_rank,
    "in step again": same_calls,
    "keys": lambda s, rank: s.all_reduce({"loss" if rank == 0 else "los": 1.0}),
    "dtypes": lambda s, rank: s.all_reduce({"x": torch.zeros(2, dtype=torch.float32 if rank == 0 else torch.int64)}),
    "shapes": lambda s, rank: s.all_reduce({"x": torch.zeros(2 + rank)}),
    "ops": lambda s, rank: s.all_reduce({"x": 1.0}, "sum" if rank == 0 else "max"),
    "sources": lambda s, rank: s.broadcast(1.0, src=rank),
    "gathered dtypes": lambda s, rank: s.all_gather(torch.zeros(2, dtype=torch.float32 if rank == 0 else torch.bool)),
    "gathered keys": lambda s, rank: s.all_gather({f"x{rank}": 1.0}),
    "arity": lambda s, rank: s.prepare(nn.Linear(1, 1), *([None] * rank)),
    "tags": lambda s, rank: s.save_ckpt(nn.Linear(1, 1), "unused", tag=f"step{rank}"),
}


def run_pair(rank: int) -> Outcomes:
    strategy = checked(world_of(rank, 2))
    outcomes = {name: outcome_of(scenario, strategy, rank) for name, scenario in PAIR.items()}
    impatient = checked(world_of(rank, 2), timeout=timedelta(seconds=0.3))
    outcomes["late"] = outcome_of(late, impatient, rank)
    outcomes["in step after late"] = outcome_of(same_calls, impatient, rank)
    outcomes["closed"] = outcome_of(closes, impatient, rank)
    outcomes["still closed"] = outcome_of(still_gone, impatient, rank)
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    strategy.barrier()
    model = nn.Linear(1, 1)
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        strategy.get_grad_norm(model)
    seconds = time.perf_counter() - start
    dist.barrier()
    outcomes["keys added by many calls"] = Outcome(str(store.num_keys() - keys), seconds)
    return outcomes


def run_three(rank: int) -> Outcomes:
    strategy = checked(world_of(rank, 3))
    outcomes = {"same": outcome_of(same_calls, strategy, rank)}
    outcomes["one differs"] = outcome_of(lambda s, r: s.barrier() if r == 1 else s.all_gather(1.0), strategy, rank)
    outcomes["two differ, one has not come"] = outcome_of(two_of_three, strategy, rank)
    outcomes["in step again"] = outcome_of(same_calls, strategy, rank)
    return outcomes


def two_of_three(strategy: StrategyRecord, rank: int) -> None:
    """Rank 2 comes when the others have both raised: were they to wait for it, all would hang."""
    try:
        if rank < 2:
            branch_on_rank(strategy, rank)
    finally:
        dist.barrier()
    if rank == 2:
        strategy.barrier()


def main(world_size: int, rank: int, meeting_point: str, report: Path) -> None:
    dist.init_process_group("gloo", meeting_point, rank=rank, world_size=world_size, timeout=timedelta(minutes=1))
    outcomes = run_pair(rank) if world_size == 2 else run_three(rank)

    def write() -> None:
        report.write_text(json.dumps({name: [each.error, each.seconds] for name, each in outcomes.items()}))

    write()
    # The last scenario: rank 1 fails alone, in an operation, and its process ends with the error.
    survivor = checked(evolve(world_of(rank, world_size), get_grad_norm=fails if rank == 1 else lambda model: 0.0))
    survivor.barrier()
    start = time.monotonic()
    try:
        survivor.get_grad_norm(nn.Linear(1, 1))
        survivor.barrier()
    except RankMismatch as mismatch:
        outcomes["ended"] = Outcome(str(mismatch), time.monotonic() - start)
    write()


def fails(model: nn.Module) -> float:
    raise ValueError("on one rank only")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
