"""The laws of collectives (G). What every rank contributes is computed by each from the same values, so each knows all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from lightrft.conformance.law import Law, Make
from lightrft.conformance.probes import refused
from lightrft.ops.collectives import weighted_mean
from lightrft.strategy.protocol import ReduceOp

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.uint8, torch.bool)
OPS: tuple[ReduceOp, ...] = ("mean", "sum", "max", "min")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Small whole values: exact in every dtype, whatever the order in which they are added."""
    dtype = draw(st.sampled_from(FLOATS + INTS))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return (torch.arange(math.prod(shape)).reshape(shape) * draw(st.integers(0, 3))).to(dtype)


numbers = st.integers(-(2**62), 2**62) | st.integers(-1000, 1000).map(float) | st.booleans()
trees = st.recursive(tensors() | numbers, lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=3))


def of_rank(tree: Any, rank: int) -> Any:
    """What a rank contributes: other values, the same structure, and its dicts filled in another order."""
    if isinstance(tree, dict):
        items = list(tree.items())
        return {key: of_rank(value, rank) for key, value in (items if rank % 2 == 0 else reversed(items))}
    if isinstance(tree, Tensor):
        return (
            tree if tree.dtype is torch.bool and rank % 2 == 0 else ~tree if tree.dtype is torch.bool else tree + rank
        )
    return bool(tree) ^ bool(rank % 2) if isinstance(tree, bool) else tree + rank


def reduced(values: list[Any], op: str) -> Any:
    """The oracle."""
    if isinstance(values[0], dict):
        return {key: reduced([value[key] for value in values], op) for key in values[0]}
    if isinstance(values[0], Tensor):
        dtype = values[0].dtype
        exact = torch.stack([value.to(torch.float64 if dtype.is_floating_point else torch.int64) for value in values])
        found = exact.amax(0) if op == "max" else exact.amin(0) if op == "min" else exact.sum(0)
        if op == "mean":
            return (found.double() / len(values)).to(dtype if dtype.is_floating_point else torch.float64)
        return found if dtype is torch.bool and op == "sum" else found.to(dtype)
    if op == "mean":
        return sum(values) / len(values)
    return sum(values) if op == "sum" else max(values) if op == "max" else min(values)


def leaves(tree: Any) -> list[Any]:
    """The tensors and numbers in order of their keys."""
    return [leaf for key in sorted(tree) for leaf in leaves(tree[key])] if isinstance(tree, Mapping) else [tree]


def expect_equal(found: Any, expected: Any, ordered_as: Any = None) -> None:
    """Structure, dtype, shape and value."""
    if isinstance(expected, Mapping):
        assert isinstance(found, dict), f"a mapping became {type(found).__name__}"
        assert found.keys() == expected.keys()
        for key in expected:
            expect_equal(found[key], expected[key])
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, f"{found.dtype} is not {expected.dtype}"
        assert found.shape == expected.shape
        assert torch.equal(found, expected), f"{found} is not {expected}"
    else:
        assert type(found) is type(expected), f"{found!r} is no {type(expected).__name__}"
        assert found == expected, f"{found!r} is not {expected!r}"


def reduces(make: Make, tree: Any, op: Any) -> None:
    strategy = make()
    mine = of_rank(tree, strategy.get_rank())
    before = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves(mine)]
    found = strategy.all_reduce(mine, op)
    expect_equal(found, reduced([of_rank(tree, rank) for rank in range(strategy.world_size)], op))
    assert list(found) == list(mine) if isinstance(mine, dict) else True, "the order of the keys changed"
    for leaf, result in zip(leaves(mine), leaves(found), strict=True):
        if isinstance(leaf, Tensor):
            assert result.numel() == 0 or result.data_ptr() != leaf.data_ptr(), (
                "the result shares memory with the input"
            )
            assert result.device == leaf.device
            result.fill_(1)
    for leaf, old in zip(leaves(mine), before, strict=True):
        expect_equal(leaf, old)


def every_operation_by_key(make: Make) -> None:
    """Not by the place in which a rank has a key, and on every rank."""
    strategy = make()

    def mine(rank: int) -> dict[str, Any]:
        tree = {"loss": 3.0 * rank, "tokens": 10 - rank}
        return tree if rank % 2 == 0 else dict(reversed(tree.items()))

    def nested(rank: int) -> dict[str, Any]:
        return {"of": mine(rank), "x": torch.tensor([1.0 + rank, -2.0]), "y": rank == 0}

    for op in OPS:
        for tree in (mine, nested):
            found: Any = strategy.all_reduce(tree(strategy.get_rank()), op)
            expect_equal(found, reduced([tree(rank) for rank in range(strategy.world_size)], op))


def integers_stay_exact(make: Make, op: Any, value: int) -> None:
    strategy = make()
    first = strategy.get_rank() == 0
    mine, other = (value, 0) if first else (0, value)
    expected = {"sum": value, "max": max(value, 0), "min": min(value, 0)}[op] if strategy.world_size > 1 else mine
    assert strategy.all_reduce(mine if first else 0, op) == expected, other
    assert int(strategy.all_reduce(torch.tensor(mine if first else 0), op)) == expected


def mean_of_integers(make: Make) -> None:
    strategy = make()
    mean = strategy.all_reduce(strategy.get_rank() + 1)
    assert type(mean) is float
    assert mean == sum(range(1, strategy.world_size + 1)) / strategy.world_size
    assert strategy.all_reduce(torch.tensor([1, 2])).dtype is torch.float64
    assert strategy.all_reduce(torch.tensor([True, False]), "sum").dtype is torch.int64


def kinds_of_numbers(make: Make, value: Any) -> None:
    strategy = make()
    mine = 0.5 if strategy.get_rank() == 0 and strategy.world_size > 1 else value
    found = strategy.all_reduce({"metric": mine})["metric"]
    others = strategy.world_size - 1
    expected = (0.5 + others * float(value)) / strategy.world_size if others else float(value)
    assert type(found) is float
    assert found == expected


def refuses_before_sending(make: Make) -> None:
    strategy = make()
    wrong: Any = "avg"
    text: Any = {"a": {"b": "text"}}
    refused(ValueError, "'avg' is no reduction", lambda: strategy.all_reduce(1.0, wrong))
    refused(TypeError, "data['a']['b'] is a str", lambda: strategy.all_reduce(text))
    refused(ValueError, f"src={strategy.world_size} is no rank", lambda: strategy.broadcast(1.0, strategy.world_size))
    assert strategy.all_reduce({}) == {}
    assert strategy.all_gather({}) == {}


def gathers(make: Make, tree: Any) -> None:
    strategy = make()
    found = strategy.all_gather(of_rank(tree, strategy.get_rank()))

    def compare(found: Any, tree: Any) -> None:
        if isinstance(tree, dict):
            assert found.keys() == tree.keys()
            for key in tree:
                compare(found[key], tree[key])
        else:
            assert len(found) == strategy.world_size
            for rank, value in enumerate(found):
                expect_equal(value, of_rank(tree, rank))

    compare(found, tree)


def gathers_other_shapes(make: Make, sizes: list[int], dtype: torch.dtype) -> None:
    strategy = make()

    def part(rank: int) -> Tensor:
        return torch.full((sizes[rank % len(sizes)], 3), rank + 1).to(dtype)

    found = strategy.all_gather({"x": part(strategy.get_rank())})["x"]
    assert len(found) == strategy.world_size
    for rank, value in enumerate(found):
        expect_equal(value, part(rank))


def empty_on_one_rank(make: Make) -> None:
    strategy = make()
    mine = torch.zeros(0, 3) if strategy.get_rank() == 0 else torch.ones(2, 3)
    shapes = [tuple(part.shape) for part in strategy.all_gather(mine)]
    assert shapes == [(0, 3), *[(2, 3)] * (strategy.world_size - 1)], shapes


def reduce_and_gather_agree(make: Make, x: Tensor, factor: int) -> None:
    strategy = make()
    mine = of_rank(x, strategy.get_rank())
    gathered = strategy.all_gather(mine)
    total = torch.stack(gathered).sum(0)
    expect_equal(strategy.all_reduce(mine, "sum").double(), total.double())
    mean = total.double() / strategy.world_size
    found = strategy.all_reduce(mine, "mean")
    expect_equal(found.double(), mean.to(found.dtype).double())
    wide = mine.double()
    expect_equal(strategy.all_reduce(wide * factor, "sum"), strategy.all_reduce(wide, "sum") * factor)
    everyones = strategy.all_gather(strategy.all_reduce(wide, "sum"))
    assert all(torch.equal(one, everyones[0]) for one in everyones), "the ranks hold different results"


def broadcasts(make: Make, tree: Any) -> None:
    strategy = make()
    for src in range(strategy.world_size):
        mine = of_rank(tree, strategy.get_rank())
        found = strategy.broadcast(mine, src)
        expect_equal(found, of_rank(tree, src))
        for leaf, result in zip(leaves(mine), leaves(found), strict=True):
            if isinstance(leaf, Tensor) and leaf.numel():
                assert result.data_ptr() != leaf.data_ptr(), "the result shares memory with the input"


def true_mean(make: Make) -> None:
    strategy = make()
    values = [1.0, 2.0, 3.0, 4.0, 5.0] if strategy.get_rank() == 0 else [10.0, 20.0, 30.0, 40.0]
    found = weighted_mean(strategy, sum(values), len(values))
    others = strategy.world_size - 1
    assert found == (15.0 + 100.0 * others) / (5 + 4 * others)
    assert math.isnan(weighted_mean(strategy, 0.0, 0))


KINDS = st.sampled_from([np.float64(1.5), np.float32(1.5), np.int64(3), np.bool_(True), True, 3, 1.5])
LAWS = (
    Law("G1 FC22: reduces, keeps structure and dtype, shares nothing", reduces,
        {"tree": trees, "op": st.sampled_from(OPS)}),
    Law("G1: every operation, by key", every_operation_by_key),
    Law("G1 FC23: integers stay exact", integers_stay_exact,
        {"op": st.sampled_from(["sum", "max", "min"]), "value": st.sampled_from([2**63 - 1, 2**53 + 1, -(2**63)])}),
    Law("G1 FC23: the mean of integers is a float", mean_of_integers),
    Law("G1 FC24: numbers of other kinds on other ranks", kinds_of_numbers, {"value": KINDS}),
    Law("G1: refuses before anything is sent", refuses_before_sending),
    Law("G2: gathers in rank order", gathers, {"tree": trees}),
    Law("G2: gathers what differs in shape", gathers_other_shapes,
        {"sizes": st.lists(st.integers(0, 4), min_size=2, max_size=3),
         "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64])}),
    Law("G2 FC14: gathers what is empty on one rank", empty_on_one_rank),
    Law("G3: reduce and gather agree", reduce_and_gather_agree, {"x": tensors(), "factor": st.integers(0, 3)}),
    Law("G5: broadcast copies from any rank", broadcasts, {"tree": trees}),
    Law("G6 FC46: weighted_mean is the true mean", true_mean),
)  # fmt: skip
