"""The laws of the world (W): ranks, seeds, data."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from lightrft.conformance.law import Law, Make
from lightrft.conformance.probes import changed_environment, refused
from lightrft.errors import ConfigError


def ranks_are_what_they_are(make: Make) -> None:
    strategy = make()
    assert strategy.all_gather(strategy.get_rank()) == list(range(strategy.world_size))
    assert strategy.all_gather(strategy.is_rank_0()) == [rank == 0 for rank in range(strategy.world_size)]
    strategy.barrier()


def environment_is_left_alone(make: Make) -> None:
    before = dict(os.environ)
    strategy = make(train_batch_size=make().world_size)
    model = nn.Linear(2, 2)
    strategy.prepare((model, strategy.create_optimizer(model)))
    changed = changed_environment(before)
    assert not changed, f"changed in the environment: {changed}"


def set_up_and_closed_twice(make: Make) -> None:
    make()  # what a library starts once and keeps is not counted
    threads = threading.active_count()
    group = dist.is_initialized()
    strategy = make()
    torch.rand(3)
    state = torch.get_rng_state()
    strategy.setup_distributed()
    assert torch.equal(state, torch.get_rng_state()), "set up again, it seeded again"
    strategy.close()
    strategy.close()
    assert dist.is_initialized() is group, "a process group of somebody else was touched"
    assert threading.active_count() <= threads


def same_start_on_all_ranks(make: Make, seed: int) -> None:
    starts = []
    for disturbed in (False, True):
        strategy = make(seed=seed)
        if disturbed:
            torch.rand(3 + strategy.get_rank())
        made = []
        for _ in range(2):
            with strategy.init_model_context():
                made.append(nn.Linear(3, 3).weight.detach().clone())
        for weight in made:
            assert all(torch.equal(weight, other) for other in strategy.all_gather(weight)), "ranks start apart"
        assert not torch.equal(*made), "two models start as one"
        starts.append(made)
    assert all(map(torch.equal, *starts)), "the same seed gives another start"


def dropout_differs_and_repeats(make: Make, seed: int) -> None:
    masks = []
    for make_a_model in (False, True):
        strategy = make(seed=seed)
        if make_a_model:
            with strategy.init_model_context():
                nn.Linear(3, 3)
        masks.append(nn.functional.dropout(torch.ones(100)))
    assert torch.equal(*masks), "the same run drew another dropout"
    of_ranks = strategy.all_gather(masks[0])
    assert all(not torch.equal(masks[0], mask) for rank, mask in enumerate(of_ranks) if rank != strategy.get_rank())
    draws = strategy.all_gather({"numpy": float(np.random.rand()), "python": random.random()})
    assert len(set(draws["numpy"])) == len(set(draws["python"])) == strategy.world_size


def batch_sizes_that_do_not_fit(make: Make) -> None:
    world = make().world_size
    for batch, micro in ((10, 4), (2 * world + 1, 2)):
        refused(ConfigError, f"train_batch_size={batch}", maker(make, batch, micro))
    refused(ConfigError, f"world_size={world}", lambda: make(train_batch_size=1, micro_train_batch_size=2))


def maker(make: Make, batch: int, micro: int) -> Callable[[], object]:
    """Makes a strategy of these batch sizes."""
    return lambda: make(train_batch_size=batch, micro_train_batch_size=micro)


def batches(strategy: Any, samples: int, size: int, consumed: int = 0, **options: Any) -> list[list[int]]:
    """The samples of each of this rank's batches, in one epoch."""
    loader = strategy.setup_dataloader(
        list(range(samples)), size, consumed_samples=consumed, collate_fn=list, **options
    )
    return [list(batch) for batch in loader]


def in_global_order(strategy: Any, mine: list[list[int]]) -> list[int]:
    """The samples of all ranks in the order in which global batches take them."""
    width = max((len(batch) for batch in mine), default=0)
    padded = torch.full((len(mine), max(width, 1)), -1)
    for row, batch in enumerate(mine):
        padded[row, : len(batch)] = torch.tensor(batch, dtype=torch.long)
    of_ranks = strategy.all_gather(padded)
    steps = max(len(part) for part in of_ranks)
    found = []
    for step in range(steps):
        for part in of_ranks:
            if step < len(part):
                found += [int(sample) for sample in part[step] if sample >= 0]
    return found


def every_sample_once(make: Make, samples: int, size: int, shuffle: bool) -> None:
    strategy = make()
    mine = batches(strategy, samples, size, shuffle=shuffle, drop_last=False)
    found = in_global_order(strategy, mine)
    assert sorted(found) == list(range(samples)), f"{found} are not the {samples} samples, each once"
    assert shuffle or found == list(range(samples)), f"{found} were shuffled unasked"
    full = in_global_order(strategy, batches(strategy, samples, size, shuffle=shuffle))
    step = size * strategy.world_size
    assert full == found[: samples // step * step], "drop_last dropped more than the last"


def another_order_each_epoch(make: Make) -> None:
    strategy = make()
    loader: Any = strategy.setup_dataloader(list(range(100)), 4, collate_fn=list, drop_last=False)
    first, second = (in_global_order(strategy, [list(batch) for batch in loader]) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second, "the second epoch has the order of the first"


def resumes_in_mid_epoch(make: Make, consumed: int, shuffle: bool) -> None:
    strategy = make()
    whole = in_global_order(strategy, batches(strategy, 100, 4, shuffle=shuffle, drop_last=False))
    rest = in_global_order(strategy, batches(strategy, 100, 4, consumed, shuffle=shuffle, drop_last=False))
    assert rest == whole[consumed:], "the rest of the epoch is not what an uninterrupted run would have had"


def order_of_any_world_size(make: Make) -> None:
    """100 samples, stopped after 40: the other 60, each once, in an order that does not depend on the ranks."""
    strategy = make(seed=7)
    found = in_global_order(strategy, batches(strategy, 100, 2, 40, drop_last=False))
    generator = torch.Generator().manual_seed(derived(7))
    assert found == torch.randperm(100, generator=generator).tolist()[40:]


def derived(seed: int) -> int:
    """The seed of the first epoch's order."""
    from lightrft.ops.seeds import derived_seed

    return derived_seed(seed, 2, 0)


LAWS = (
    Law("W1: ranks count from 0 and all are there", ranks_are_what_they_are),
    Law("W1 FC43: the environment is left alone", environment_is_left_alone),
    Law("W3: set up twice, closed twice, another's process group left alone", set_up_and_closed_twice),
    Law("W4: the same start on all ranks", same_start_on_all_ranks, {"seed": st.integers(0, 1000)}),
    Law("W4: random numbers differ between ranks and repeat between runs", dropout_differs_and_repeats,
        {"seed": st.integers(0, 1000)}),
    Law("C5: batch sizes that do not fit are refused on every rank", batch_sizes_that_do_not_fit),
    Law("W5: every sample once per epoch", every_sample_once,
        {"samples": st.integers(0, 40), "size": st.integers(1, 5), "shuffle": st.booleans()}),
    Law("W5: another order in each epoch", another_order_each_epoch),
    Law("W5: resumes in the middle of an epoch", resumes_in_mid_epoch,
        {"consumed": st.integers(0, 99), "shuffle": st.booleans()}),
    Law("W5 FC15: the order does not depend on the number of ranks", order_of_any_world_size),
)  # fmt: skip
