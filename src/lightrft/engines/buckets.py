"""Weights in lists of bounded size, so that never a second whole model is in memory (R3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def buckets(
    named_tensors: Iterable[tuple[str, Tensor]], limit: int, dtype: torch.dtype | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in their order, in lists of at most ``limit`` bytes; a larger one alone. The last may be part full.

    ``dtype``: what those of floating point are cast to, once. Beside a list and the one before it, which its user may still
    hold, a single tensor is in memory here: the next one.
    """
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        more = tensor.numel() * target.itemsize
        if bucket and size + more > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.to(target)))
        size += more
    if bucket:
        yield bucket
