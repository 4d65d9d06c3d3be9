"""Faults of the world and of collectives: ranks, seeds, data, and what every rank gets of the others."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from lightrft.backends import fake, fsdp
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.record import StrategyRecord
from mutants.mutant import Mutant, Planted

PLANTED = "LIGHTRFT_PLANTED_FAULT"


def rank_0_everywhere(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, get_rank=lambda: 0)


def everyone_is_rank_0(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, is_rank_0=lambda: True)


def environment_changed(strategy: StrategyRecord) -> StrategyRecord:
    def setup_distributed(*args: Any, **kwargs: Any) -> None:
        os.environ[PLANTED] = "1"
        strategy.setup_distributed(*args, **kwargs)

    def close() -> None:
        os.environ.pop(PLANTED, None)
        strategy.close()

    return evolve(strategy, setup_distributed=setup_distributed, close=close)


def seeds_with_each_setup(strategy: StrategyRecord) -> StrategyRecord:
    def setup_distributed(*args: Any, **kwargs: Any) -> None:
        strategy.setup_distributed(*args, **kwargs)
        torch.manual_seed(strategy.seed)

    return evolve(strategy, setup_distributed=setup_distributed)


def closed_but_once(strategy: StrategyRecord) -> StrategyRecord:
    closed: list[bool] = []

    def close() -> None:
        strategy.close()
        closed.append(True)
        if len(closed) == 2:
            raise Planted("already closed")

    return evolve(strategy, close=close)


def start_unseeded(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, init_model_context=lambda meta_init=False: nullcontext())


def start_of_rank(strategy: StrategyRecord, offset: int) -> StrategyRecord:
    @contextmanager
    def init_model_context(meta_init: bool = False) -> Iterator[None]:
        with torch.random.fork_rng():
            torch.manual_seed(strategy.seed + offset)
            yield

    return evolve(strategy, init_model_context=init_model_context)


def every_model_starts_alike(strategy: StrategyRecord) -> StrategyRecord:
    return start_of_rank(strategy, 0)


def ranks_start_apart(strategy: StrategyRecord) -> StrategyRecord:
    return start_of_rank(strategy, strategy.get_rank())


def one_dropout_for_all(strategy: StrategyRecord) -> StrategyRecord:
    def setup_distributed(*args: Any, **kwargs: Any) -> None:
        strategy.setup_distributed(*args, **kwargs)
        torch.manual_seed(strategy.seed)
        np.random.seed(strategy.seed)
        random.seed(strategy.seed)

    return evolve(strategy, setup_distributed=setup_distributed)


def memory_taken_at_once(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, init_model_context=lambda meta_init=False: strategy.init_model_context())


def batch_size_rounded(config: StrategyConfig) -> StrategyConfig:
    micro = config.micro_train_batch_size
    return evolve(config, train_batch_size=-(-config.train_batch_size // micro) * micro)


# --------------------------------------------------------------------------------------------------------------- data


def loader_told(strategy: StrategyRecord, **told: Any) -> StrategyRecord:
    """The loader is made with these options, whatever the caller asks for."""

    def setup_dataloader(*args: Any, **kwargs: Any) -> Any:
        return strategy.setup_dataloader(*args, **{**kwargs, **told})

    return evolve(strategy, setup_dataloader=setup_dataloader)


def consumed_forgotten(strategy: StrategyRecord) -> StrategyRecord:
    def setup_dataloader(replay_buffer: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        return strategy.setup_dataloader(replay_buffer, batch_size, *args, **{**kwargs, "consumed_samples": 0})

    return evolve(strategy, setup_dataloader=setup_dataloader)


def last_batch_dropped(strategy: StrategyRecord) -> StrategyRecord:
    return loader_told(strategy, drop_last=True)


def always_shuffled(strategy: StrategyRecord) -> StrategyRecord:
    return loader_told(strategy, shuffle=True)


def never_shuffled(strategy: StrategyRecord) -> StrategyRecord:
    return loader_told(strategy, shuffle=False)


def one_order_for_all_epochs(strategy: StrategyRecord) -> StrategyRecord:
    def setup_dataloader(*args: Any, **kwargs: Any) -> Any:
        return list(strategy.setup_dataloader(*args, **kwargs))

    return evolve(strategy, setup_dataloader=setup_dataloader)


def ranks_shuffle_apart(strategy: StrategyRecord) -> StrategyRecord:
    other = fsdp.build(evolve(strategy.config, seed=strategy.seed + strategy.get_rank()))
    return evolve(strategy, setup_dataloader=other.setup_dataloader)


def every_rank_takes_all(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, setup_dataloader=fake.build(evolve(strategy.config, backend="fake")).setup_dataloader)


# --------------------------------------------------------------------------------------------------------- collectives


def each_leaf(tree: Any, change: Any) -> Any:
    """``change`` done to each tensor and number of a tree."""
    if isinstance(tree, Mapping):
        return {key: each_leaf(value, change) for key, value in tree.items()}
    return change(tree)


def mean_undivided(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        mean = strategy.all_reduce(data, op)
        return each_leaf(mean, lambda leaf: leaf * strategy.world_size) if op == "mean" else mean

    return evolve(strategy, all_reduce=all_reduce)


def own_value_kept(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, all_reduce=lambda data, op="mean": each_leaf(data, lambda leaf: leaf))


def sum_is_a_mean(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        return strategy.all_reduce(data, "mean" if op == "sum" else op)

    return evolve(strategy, all_reduce=all_reduce)


def sum_of_the_largest(strategy: StrategyRecord) -> StrategyRecord:
    """As if all ranks had as much as the one that has most."""

    def all_reduce(data: Any, op: Any = "mean") -> Any:
        if op != "sum":
            return strategy.all_reduce(data, op)
        return each_leaf(strategy.all_reduce(data, "max"), lambda leaf: leaf * strategy.world_size)

    return evolve(strategy, all_reduce=all_reduce)


def input_given_back(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, all_reduce=lambda data, op="mean": data)


def input_overwritten(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        found = strategy.all_reduce(data, op)
        if isinstance(data, Tensor) and data.dtype == found.dtype:
            data.copy_(found)
        return found

    return evolve(strategy, all_reduce=all_reduce)


def ints_through_float32(strategy: StrategyRecord) -> StrategyRecord:
    def rounded(leaf: Any) -> Any:
        return int(torch.tensor(leaf, dtype=torch.float32)) if type(leaf) is int else leaf

    def all_reduce(data: Any, op: Any = "mean") -> Any:
        return each_leaf(strategy.all_reduce(data, op), rounded)

    return evolve(strategy, all_reduce=all_reduce)


def mean_of_ints_truncated(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        found = strategy.all_reduce(data, op)
        return int(found) if op == "mean" and type(data) is int else found

    return evolve(strategy, all_reduce=all_reduce)


def numpy_numbers_kept(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        return each_leaf(strategy.all_reduce(data, op), lambda leaf: np.float64(leaf) if type(leaf) is float else leaf)

    return evolve(strategy, all_reduce=all_reduce)


def unknown_op_is_a_sum(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        return strategy.all_reduce(data, op if op in ("mean", "sum", "max", "min") else "sum")

    return evolve(strategy, all_reduce=all_reduce)


def keys_sorted(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        found: Any = strategy.all_reduce(data, op)
        return {key: found[key] for key in sorted(found, reverse=True)} if isinstance(found, dict) else found

    return evolve(strategy, all_reduce=all_reduce)


def keys_by_position(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        if not isinstance(data, Mapping) or any(isinstance(value, (Mapping, Tensor)) for value in data.values()):
            return strategy.all_reduce(data, op)
        found: Any = strategy.all_reduce({str(place): value for place, value in enumerate(data.values())}, op)
        return dict(zip(data, found.values(), strict=True))

    return evolve(strategy, all_reduce=all_reduce)


def minimum_for_maximum(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        return strategy.all_reduce(data, "min" if op == "max" else op)

    return evolve(strategy, all_reduce=all_reduce)


def reduced_on_rank_0_alone(strategy: StrategyRecord) -> StrategyRecord:
    def all_reduce(data: Any, op: Any = "mean") -> Any:
        found = strategy.all_reduce(data, op)
        return found if strategy.is_rank_0() else each_leaf(data, lambda leaf: leaf)

    return evolve(strategy, all_reduce=all_reduce)


def of_lists(found: Any, change: Any) -> Any:
    """``change`` done to each list of ranks."""
    return {key: of_lists(value, change) for key, value in found.items()} if isinstance(found, dict) else change(found)


def gathered(strategy: StrategyRecord, change: Any) -> StrategyRecord:
    def all_gather(data: Any) -> Any:
        return of_lists(strategy.all_gather(data), change)

    return evolve(strategy, all_gather=all_gather)


def ranks_out_of_order(strategy: StrategyRecord) -> StrategyRecord:
    return gathered(strategy, lambda values: values[::-1])


def last_rank_lost(strategy: StrategyRecord) -> StrategyRecord:
    return gathered(strategy, lambda values: values[:-1])


def own_value_first(strategy: StrategyRecord) -> StrategyRecord:
    rank = strategy.get_rank()
    return gathered(strategy, lambda values: [values[rank], *values[:rank], *values[rank + 1 :]])


def empty_ones_left_out(strategy: StrategyRecord) -> StrategyRecord:
    def full(values: Any) -> Any:
        return [value for value in values if not isinstance(value, Tensor) or value.numel()]

    return gathered(strategy, full)


def padded_to_the_longest(strategy: StrategyRecord) -> StrategyRecord:
    def padded(values: Any) -> Any:
        if not all(isinstance(value, Tensor) and value.ndim for value in values):
            return values
        most = max(len(value) for value in values)
        return [torch.cat([value, value.new_zeros(most - len(value), *value.shape[1:])]) for value in values]

    return gathered(strategy, padded)


def not_a_list_when_alone(strategy: StrategyRecord) -> StrategyRecord:
    return gathered(strategy, lambda values: values[0] if len(values) == 1 else values)


def bools_as_bytes(strategy: StrategyRecord) -> StrategyRecord:
    def as_bytes(values: Any) -> Any:
        return [value.to(torch.uint8) if isinstance(value, Tensor) and value.dtype is torch.bool else value
                for value in values]  # fmt: skip

    return gathered(strategy, as_bytes)


def broadcast_from_rank_0(strategy: StrategyRecord) -> StrategyRecord:
    def broadcast(data: Any, src: int = 0) -> Any:
        strategy.broadcast(data, src)
        return strategy.broadcast(data, 0)

    return evolve(strategy, broadcast=broadcast)


def broadcast_shares_memory(strategy: StrategyRecord) -> StrategyRecord:
    def broadcast(data: Any, src: int = 0) -> Any:
        found = strategy.broadcast(data, src)
        return data if strategy.get_rank() == src else found

    return evolve(strategy, broadcast=broadcast)


MUTANTS = (
    Mutant("rank-0-everywhere", "every rank says that it is rank 0", "W1: ranks", rank_0_everywhere, "fsdp", 2),
    Mutant("everyone-is-rank-0", "every rank logs and writes", "W1: ranks", everyone_is_rank_0, "fsdp", 2),
    Mutant("FC43-environment-changed", "setting up leaves a variable in the environment", "W1 FC43", environment_changed),
    Mutant("seeds-with-each-setup", "set up again, it seeds again", "W3", seeds_with_each_setup),
    Mutant("closed-but-once", "a second close raises", "W3", closed_but_once),
    Mutant("start-unseeded", "models are made from whatever was drawn before", "W4: the same start", start_unseeded),
    Mutant("every-model-starts-alike", "two models of a run get the same parameters", "W4: the same start",
           every_model_starts_alike),
    Mutant("ranks-start-apart", "each rank makes other parameters", "W4: the same start", ranks_start_apart, "fsdp", 2),
    Mutant("one-dropout-for-all", "all ranks draw the same random numbers", "W4: random", one_dropout_for_all, "fsdp", 2),
    Mutant("memory-taken-at-once", "meta_init makes the whole model on every rank", "W4: made", memory_taken_at_once,
           "fsdp", 2),
    Mutant("batch-size-rounded", "a batch size that does not fit is rounded up", "C5", configure=batch_size_rounded),
    Mutant("consumed-forgotten", "samples that were consumed come again", "W5: resumes", consumed_forgotten),
    Mutant("last-batch-dropped", "the last samples of an epoch are dropped unasked", "W5: every", last_batch_dropped),
    Mutant("always-shuffled", "shuffle=False shuffles", "W5: every", always_shuffled),
    Mutant("never-shuffled", "shuffle=True does not", "W5 FC15", never_shuffled),
    Mutant("one-order-for-all-epochs", "every epoch has the order of the first", "W5: another order",
           one_order_for_all_epochs),
    Mutant("FC15-ranks-shuffle-apart", "prompts are shuffled anew on each rank", "W5: every", ranks_shuffle_apart,
           "fsdp", 2),
    Mutant("every-rank-takes-all", "each rank goes through the whole data set", "W5: every", every_rank_takes_all,
           "fsdp", 2),
    Mutant("mean-undivided", "the mean over ranks is their sum", "G3", mean_undivided, "fsdp", 2),
    Mutant("own-value-kept", "each rank keeps its own value", "G6", own_value_kept, "fsdp", 2),
    Mutant("sum-is-a-mean", "a sum is divided by W", "T8 FC02", sum_is_a_mean, "fsdp", 2),
    Mutant("sum-of-the-largest", "ranks are taken to have equal counts", "T8: ragged", sum_of_the_largest, "fsdp", 2),
    Mutant("input-given-back", "all_reduce gives the input itself back", "G1 FC22", input_given_back),
    Mutant("FC22-input-overwritten", "all_reduce writes into the caller's tensor", "G1 FC22", input_overwritten, "fsdp", 2),
    Mutant("FC23-ints-through-float32", "integers pass through float32", "G1 FC23: integers", ints_through_float32),
    Mutant("FC23-mean-of-ints-truncated", "the mean of integers is an integer", "G1 FC23: the mean", mean_of_ints_truncated),
    Mutant("FC24-numpy-numbers-kept", "floats come back as numpy's", "G1 FC24", numpy_numbers_kept),
    Mutant("unknown-op-is-a-sum", "an unknown reduction is taken for a sum", "G1: refuses", unknown_op_is_a_sum),
    Mutant("keys-sorted", "a dict comes back in another order of keys", "G1 FC22", keys_sorted),
    Mutant("keys-by-position", "values of a dict are matched by position and not by key", "G1: every", keys_by_position,
           "fsdp", 2),
    Mutant("minimum-for-maximum", "max gives the minimum", "G1: every", minimum_for_maximum, "fsdp", 2),
    Mutant("reduced-on-rank-0-alone", "only rank 0 gets the reduced value", "G1: every", reduced_on_rank_0_alone, "fsdp", 2),
    Mutant("ranks-out-of-order", "all_gather lists the ranks backwards", "G2: gathers in", ranks_out_of_order, "fsdp", 2),
    Mutant("last-rank-lost", "all_gather loses the last rank", "G2: gathers in", last_rank_lost, "fsdp", 2),
    Mutant("own-value-first", "each rank finds its own value first", "G2: gathers in", own_value_first, "fsdp", 2),
    Mutant("FC14-empty-ones-left-out", "what is empty on a rank is left out", "G2 FC14", empty_ones_left_out, "fsdp", 2),
    Mutant("padded-to-the-longest", "shorter tensors come back padded", "G2: gathers what", padded_to_the_longest,
           "fsdp", 2),
    Mutant("not-a-list-when-alone", "one rank alone gets its value without a list", "G2: gathers in",
           not_a_list_when_alone),
    Mutant("bools-as-bytes", "booleans come back as bytes", "G2: gathers what", bools_as_bytes),
    Mutant("broadcast-from-rank-0", "broadcast ignores src", "G5", broadcast_from_rank_0, "fsdp", 2),
    Mutant("broadcast-shares-memory", "the sender gets its own tensor back", "G5", broadcast_shares_memory),
)  # fmt: skip
