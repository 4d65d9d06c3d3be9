"""The laws of collectives (G) in a world of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from torch import Tensor

from lightrft import weighted_mean
from lightrft.strategy.protocol import ReduceOp
from support import MakeStrategy

OPS: tuple[ReduceOp, ...] = ("mean", "sum", "max", "min")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(FLOATS + INTS))
    shape = draw(st_np.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    return (torch.arange(int(np.prod(shape))).reshape(shape) * draw(st.integers(0, 5))).to(dtype)


numbers = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.booleans()
trees = st.recursive(tensors() | numbers, lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=3))


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return (
            isinstance(second, dict) and list(first) == list(second) and all(equal(first[k], second[k]) for k in first)
        )
    if isinstance(first, Tensor):
        return first.shape == second.shape and torch.equal(first.double(), second.double())
    return bool(first == second)


def floats(tree: Any) -> Any:
    """Numbers as the floats that a mean is: 2**53 + 1 has no float of its own."""
    if isinstance(tree, dict):
        return {key: floats(value) for key, value in tree.items()}
    return tree if isinstance(tree, Tensor) else float(tree)


def leaves(tree: Any) -> list[Any]:
    return [leaf for value in tree.values() for leaf in leaves(value)] if isinstance(tree, dict) else [tree]


@given(data=trees, op=st.sampled_from(OPS))
def test_G1_FC22_keeps_values_and_structure_and_shares_nothing(
    make_strategy: MakeStrategy, data: Any, op: ReduceOp
) -> None:
    strategy = make_strategy()
    before = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves(data)]
    reduced = strategy.all_reduce(data, op)
    assert equal(reduced, floats(data) if op == "mean" else data)
    for leaf, mine in zip(leaves(data), leaves(reduced), strict=True):
        if isinstance(leaf, Tensor):
            assert mine.numel() == 0 or mine.data_ptr() != leaf.data_ptr()
            assert mine.device == leaf.device
            if leaf.is_floating_point():
                assert mine.dtype == leaf.dtype
            elif op == "mean":
                assert mine.dtype is torch.float64
            mine.fill_(7)
        elif op == "mean":
            assert type(mine) is float
    assert all(equal(leaf, old) for leaf, old in zip(leaves(data), before, strict=True))


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("value", [2**63 - 1, 2**53 + 1, -(2**63)])
def test_G1_FC23_integers_stay_exact(make_strategy: MakeStrategy, op: ReduceOp, value: int) -> None:
    strategy = make_strategy()
    assert strategy.all_reduce(value, op) == value
    assert strategy.all_reduce(torch.tensor(value), op).item() == value


def test_FC23_the_mean_of_integers_is_a_float(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy()
    assert type(strategy.all_reduce(3)) is float
    assert strategy.all_reduce(torch.tensor([1, 2])).dtype is torch.float64
    assert strategy.all_reduce(torch.tensor([True, False]), "sum").dtype is torch.int64


@pytest.mark.parametrize("value", [np.float64(1.5), np.float32(1.5), np.int64(3), np.bool_(True), True, 3, 1.5])
def test_FC24_numpy_scalars_come_back_as_one_kind_of_float(make_strategy: MakeStrategy, value: float) -> None:
    mean = make_strategy().all_reduce({"metric": value})["metric"]
    assert type(mean) is float
    assert mean == float(value)


def test_G1_refuses_before_anything_is_sent(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy()
    with pytest.raises(ValueError, match="'avg' is no reduction"):
        strategy.all_reduce(1.0, "avg")  # type: ignore[call-overload]  # pyright: ignore
    with pytest.raises(TypeError, match=r"data\['a'\]\['b'\] is a str"):
        strategy.all_reduce({"a": {"b": "text"}})  # type: ignore[dict-item]  # pyright: ignore
    assert strategy.all_reduce({}) == {}


@given(data=trees)
def test_G2_gather_is_a_list_of_one(make_strategy: MakeStrategy, data: Any) -> None:
    def wrapped(tree: Any) -> Any:
        return {key: wrapped(value) for key, value in tree.items()} if isinstance(tree, dict) else [tree]

    gathered = make_strategy().all_gather(data)
    expected = wrapped(data)
    assert str(gathered) == str(expected)


@given(x=tensors(), factor=st.integers(0, 3))
def test_G3_reduce_and_gather_agree(make_strategy: MakeStrategy, x: Tensor, factor: int) -> None:
    strategy = make_strategy()
    gathered = strategy.all_gather(x)
    total = torch.stack(gathered).sum(0)
    assert equal(strategy.all_reduce(x, "sum"), total)
    assert equal(strategy.all_reduce(x, "mean"), total.double() / strategy.world_size)
    assert equal(strategy.all_reduce(x.double() * factor, "sum"), strategy.all_reduce(x.double(), "sum") * factor)
    assert all(equal(strategy.all_reduce(entry), x) for entry in gathered)


def test_broadcast_copies_and_knows_its_ranks(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy()
    x = torch.tensor([True, False])
    copy = strategy.broadcast({"x": x})["x"]
    assert torch.equal(copy, x)
    assert copy.dtype is torch.bool
    assert copy.data_ptr() != x.data_ptr()
    with pytest.raises(ValueError, match="src=1 is no rank"):
        strategy.broadcast(x, src=1)


def test_FC46_weighted_mean_is_the_true_mean(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy()
    assert weighted_mean(strategy, total=10.0, count=4) == 2.5
    assert np.isnan(weighted_mean(strategy, 0.0, 0))
