"""Reductions and gathers. What they mean for numbers, tensors and nested mappings is here, once, for every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, get_args, overload

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from lightrft.strategy.protocol import Gathered, ReduceOp, Reducible, V

if TYPE_CHECKING:
    from lightrft.strategy.protocol import AllReduce, Collectives

OPS: tuple[str, ...] = get_args(ReduceOp)


def check_op(op: str) -> None:
    """Refuses an operation that no backend has, before anything is sent."""
    if op not in OPS:
        raise ValueError(f"op={op!r} is no reduction. Use one of {', '.join(map(repr, OPS))}.")


def as_number(value: object) -> float | None:
    """A Python number, out of Python's and numpy's scalars; None for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, bool | int | float) else None


def check_reducible(data: object, path: str = "data") -> None:
    """Refuses what cannot be reduced, naming where it is, before anything is sent."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            check_reducible(value, f"{path}[{key!r}]")
    elif not isinstance(data, Tensor) and as_number(data) is None:
        raise TypeError(
            f"{path} is a {type(data).__name__}, which no collective takes. Pass tensors, numbers, or dicts of them."
        )


def reduced_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype of a reduced tensor: its own, but a mean of integers is a float and a sum of booleans an integer."""
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    if op == "mean":
        return torch.float64
    return torch.int64 if dtype is torch.bool and op == "sum" else dtype


def _reduce_alone(data: object, op: str) -> object:
    if isinstance(data, Mapping):
        return {key: _reduce_alone(value, op) for key, value in data.items()}
    if isinstance(data, Tensor):
        return data.detach().clone().to(reduced_dtype(data.dtype, op))
    number = as_number(data)
    assert number is not None
    if op == "mean":
        return float(number)
    return int(number) if op == "sum" and isinstance(number, bool) else number


@frozen
class AllReducing:
    """``all_reduce``: checks, then ``reduce``."""

    reduce: Callable[[object, str], object]

    @overload
    def __call__(self, data: Tensor, op: ReduceOp = "mean") -> Tensor: ...
    @overload
    def __call__(self, data: int, op: Literal["sum", "max", "min"]) -> int: ...
    @overload
    def __call__(self, data: float, op: ReduceOp = "mean") -> float: ...
    @overload
    def __call__(self, data: Mapping[str, Tensor], op: ReduceOp = "mean") -> dict[str, Tensor]: ...
    @overload
    def __call__(self, data: Mapping[str, int], op: Literal["sum", "max", "min"]) -> dict[str, int]: ...
    @overload
    def __call__(self, data: Mapping[str, float], op: ReduceOp = "mean") -> dict[str, float]: ...
    @overload
    def __call__(self, data: Mapping[str, Reducible], op: ReduceOp = "mean") -> dict[str, Reducible]: ...
    def __call__(self, data: Reducible, op: ReduceOp = "mean") -> object:
        check_op(op)
        check_reducible(data)
        return self.reduce(data, op)


def _gather_alone(data: object) -> object:
    if isinstance(data, Mapping):
        return {key: _gather_alone(value) for key, value in data.items()}
    return [data]


@frozen
class AllGathering:
    """``all_gather``: checks, then ``gather``."""

    gather: Callable[[object], object]

    @overload
    def __call__(self, data: Tensor) -> list[Tensor]: ...
    @overload
    def __call__(self, data: int) -> list[int]: ...
    @overload
    def __call__(self, data: float) -> list[float]: ...
    @overload
    def __call__(self, data: Mapping[str, Tensor]) -> dict[str, list[Tensor]]: ...
    @overload
    def __call__(self, data: Mapping[str, float]) -> dict[str, list[float]]: ...
    @overload
    def __call__(self, data: Mapping[str, Reducible]) -> dict[str, Gathered]: ...
    def __call__(self, data: Reducible) -> object:
        check_reducible(data)
        return self.gather(data)


@frozen
class Broadcasting:
    """``broadcast``: checks, then ``send`` from rank ``src``."""

    world_size: int
    send: Callable[[object, int], object]

    @overload
    def __call__(self, data: Tensor, src: int = 0) -> Tensor: ...
    @overload
    def __call__(self, data: int, src: int = 0) -> int: ...
    @overload
    def __call__(self, data: float, src: int = 0) -> float: ...
    @overload
    def __call__(self, data: Mapping[str, V], src: int = 0) -> dict[str, V]: ...
    def __call__(self, data: object, src: int = 0) -> object:
        if not 0 <= src < self.world_size:
            last = self.world_size - 1
            raise ValueError(
                f"src={src} is no rank: there {'is' if last == 0 else 'are'} 0"
                + (f" to {last}." if last else " alone.")
            )
        check_reducible(data)
        return self.send(data, src)


def _send_alone(data: object, src: int) -> object:
    return _reduce_alone(data, "max")


@frozen(kw_only=True)
class Collecting:
    """The three collectives of a backend."""

    all_reduce: AllReducing
    all_gather: AllGathering
    broadcast: Broadcasting


ALONE = Collecting(
    all_reduce=AllReducing(_reduce_alone),
    all_gather=AllGathering(_gather_alone),
    broadcast=Broadcasting(1, _send_alone),
)
"""Those of a single rank: the data's own values, ``[data]``, a copy."""


def weighted_mean(strategy: Collectives, total: float, count: float) -> float:
    """The true mean when ranks hold different numbers of values: sum of totals / sum of counts.

    ``all_reduce(mean)`` gives each rank the same weight, so a mean of means is biased as soon as counts differ. NaN when
    no rank has any value.
    """
    sums = strategy.all_reduce({"total": float(total), "count": float(count)}, "sum")
    return sums["total"] / sums["count"] if sums["count"] else float("nan")


class TokenMeanStrategy(Protocol):
    """What :func:`token_mean_scale` asks of a strategy."""

    @property
    def world_size(self) -> int: ...
    @property
    def accumulated_gradient(self) -> int: ...
    @property
    def all_reduce(self) -> AllReduce: ...


def token_mean_scale(strategy: TokenMeanStrategy, tokens_in_window: int, micro_batches: int | None = None) -> float:
    """The factor that turns a summed loss into the mean over all tokens of the window, on all ranks (T8).

    Multiply each micro-batch's *summed* loss by it before ``backward``. ``tokens_in_window`` counts this rank's loss
    tokens over all micro-batches of the window; ranks and micro-batches may differ. ``backward`` averages over the
    micro-batches and ranks, so the factor is ``micro_batches * world_size / tokens of all ranks``. ``micro_batches``
    defaults to A; pass the true number for a window that ``flush=True`` will cut short. 0.0 when there is no token.
    """
    tokens = strategy.all_reduce(int(tokens_in_window), "sum")
    count = strategy.accumulated_gradient if micro_batches is None else micro_batches
    return count * strategy.world_size / tokens if tokens else 0.0
