"""Buckets: everything arrives once and in order, within the bound, and with little of it in memory at a time (R3)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightrft.engines.buckets import buckets

KINDS = [torch.float32, torch.bfloat16, torch.int64]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from(KINDS)), max_size=12),
    st.integers(1, 100),
    st.sampled_from([torch.float32, torch.bfloat16, None]),
)
def test_R3_FC34_buckets_hold_every_tensor_once_within_the_bound(
    sizes: list[tuple[int, torch.dtype]], bound: int, dtype: torch.dtype | None
) -> None:
    pairs = [(str(place), torch.ones(size, dtype=kind)) for place, (size, kind) in enumerate(sizes)]
    made = list(buckets(pairs, bound, dtype))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in pairs]
    assert all(len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= bound for bucket in made)
    assert all(sum(t.nbytes for _, t in one) + other[0][1].nbytes > bound for one, other in pairwise(made))
    for (_, before), (_, after) in zip(pairs, (pair for bucket in made for pair in bucket), strict=True):
        assert after.dtype == (dtype if dtype and before.is_floating_point() else before.dtype)
        assert after is before or after.dtype != before.dtype


def test_R3_a_large_tensor_goes_alone_and_nothing_makes_no_bucket() -> None:
    sizes = [256, 256, 256, 50_000, 0, 256, 256]
    made = buckets(((str(place), torch.zeros(size)) for place, size in enumerate(sizes)), 2048)
    assert [sum(tensor.nbytes for _, tensor in bucket) for bucket in made] == [2048, 1024, 200_000, 2048]
    assert list(buckets([], 10)) == []


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_R3_two_buckets_and_the_largest_tensor_are_in_memory_at_most(dtype: torch.dtype | None) -> None:
    """As from ZeRO 3 or FSDP: each tensor is gathered when it is asked for, and is nobody else's."""
    living = peak = 0

    def gathered() -> Iterator[tuple[str, Tensor]]:
        nonlocal living, peak

        def gone(size: int) -> None:
            nonlocal living
            living -= size

        for place, size in enumerate([100, 900, 300, 300, 300, 2_000, 100, 800, 500, 500, 50] * 3):
            tensor = torch.zeros(size)
            weakref.finalize(tensor, gone, tensor.nbytes)
            living += tensor.nbytes
            peak = max(peak, living)
            yield str(place), tensor
            del tensor

    whole = 0
    bucket: list[tuple[str, Tensor]] = []
    for bucket in buckets(gathered(), 4_000, dtype):
        whole += sum(tensor.nbytes for _, tensor in bucket)
    assert peak <= 2 * 4_000 + 8_000 < whole
    del bucket
    assert living == 0
