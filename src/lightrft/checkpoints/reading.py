"""When the values of a tensor are read: at once, or when their turn to be written has come."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Read(Protocol):
    """The values of a tensor, which may itself be a placeholder on the meta device, of the same shape and dtype."""

    def __call__(self, tensor: Tensor, /) -> Tensor: ...


def as_it_is(tensor: Tensor, /) -> Tensor:
    """It is no placeholder."""
    return tensor
