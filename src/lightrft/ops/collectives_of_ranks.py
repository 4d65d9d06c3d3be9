"""Reductions and gathers over a process group, in as few messages as they need (G1 to G3).

A mapping travels as its leaves in the order of their sorted paths: the order in which a rank filled its dict does not
matter. Numbers are exact: they travel as Python writes them, and Python adds them up. Tensors of one kind travel as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from lightrft.ops.collectives import (
    ALONE,
    AllGathering,
    AllReducing,
    Broadcasting,
    Collecting,
    as_number,
    reduced_dtype,
)
from lightrft.ops.peers import naming_peers
from lightrft.ops.ranks import require_set_up
from lightrft.strategy.record import RunState, bind

Path = tuple[str, ...]
OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def collecting(state: RunState) -> Collecting:
    """The collectives of all ranks."""
    if state.world.world_size == 1:
        return ALONE
    return Collecting(
        all_reduce=AllReducing(bind(reduce_over_ranks, state)),
        all_gather=AllGathering(bind(gather_from_ranks, state)),
        broadcast=Broadcasting(state.world.world_size, bind(send_to_ranks, state)),
    )


# -------------------------------------------------------------------------------------------------------------- leaves


def leaves_of(data: object, path: Path = ()) -> dict[Path, object]:
    """The tensors and numbers of nested mappings, by the keys that lead to them, in sorted order."""
    if not isinstance(data, Mapping):
        return {path: data}
    found = {key: value for name, inner in data.items() for key, value in leaves_of(inner, (*path, name)).items()}
    return {key: found[key] for key in sorted(found, key=repr)}


def rebuilt(data: object, leaves: Mapping[Path, object], path: Path = ()) -> object:
    """``data`` with other leaves."""
    if not isinstance(data, Mapping):
        return leaves[path]
    return {name: rebuilt(inner, leaves, (*path, name)) for name, inner in data.items()}


def skeleton(data: object) -> object:
    """The mappings alone."""
    return {name: skeleton(inner) for name, inner in data.items()} if isinstance(data, Mapping) else None


def split(leaves: Mapping[Path, object]) -> tuple[dict[Path, Tensor], dict[Path, float]]:
    """The tensors, and the numbers as Python's own."""
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    numbers = {path: number for path, leaf in leaves.items() if (number := as_number(leaf)) is not None}
    return tensors, numbers


# -------------------------------------------------------------------------------------------------------------- reduce


def reduce_over_ranks(state: RunState, data: object, op: str) -> object:
    """One value out of every rank's."""
    require_set_up(state, "all_reduce")
    tensors, numbers = split(leaves_of(data))
    with naming_peers(state, "all_reduce"):
        reduced: dict[Path, object] = {}
        if numbers:
            gathered: list[dict[Path, float]] = [{}] * state.world.world_size
            dist.all_gather_object(gathered, numbers)
            check_keys("all_reduce", [sorted(map(repr, of)) for of in gathered])
            reduced |= {path: reduced_number([of[path] for of in gathered], op) for path in numbers}
        reduced |= reduce_tensors(state, tensors, op)
    return rebuilt(data, reduced)


def reduced_number(values: Sequence[float], op: str) -> float:
    """One number out of each rank's, whole where all are whole, and the same on every rank."""
    if op in ("max", "min"):
        undefined = [value for value in values if value != value]
        best = undefined[0] if undefined else (max if op == "max" else min)(values)
        return best if all(type(value) is type(values[0]) for value in values) else plain(values, best)
    whole = all(isinstance(value, int) for value in values)
    total = sum(int(value) for value in values) if whole else added(values)
    return total / len(values) if op == "mean" else total


def plain(values: Sequence[float], best: float) -> float:
    """Of mixed kinds: a float if there is one among them, else an int."""
    return int(best) if all(isinstance(value, int) for value in values) else float(best)


def added(values: Sequence[float]) -> float:
    """The sum, rounded once; infinities and NaN as IEEE adds them."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return float(sum(map(float, values)))


def carrier(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype in which a tensor travels: half precision is added up in single, small integers in int64."""
    if dtype.is_complex or dtype in (torch.float64, torch.float32):
        return dtype
    if dtype.is_floating_point:
        return torch.float32
    return torch.int64


def reduce_tensors(state: RunState, tensors: Mapping[Path, Tensor], op: str) -> dict[Path, object]:
    """All tensors that travel in one dtype, from one device, in one message."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Path]] = {}
    for path, tensor in tensors.items():
        kinds.setdefault((carrier(tensor.dtype, op), tensor.device), []).append(path)
    reduced: dict[Path, object] = {}
    for (dtype, _), paths in sorted(kinds.items(), key=lambda kind: repr(kind[1])):
        flat = torch.cat([tensors[path].detach().reshape(-1).to(dtype) for path in paths])
        shared = torch.view_as_real(flat) if dtype.is_complex else flat
        if shared.numel():
            dist.all_reduce(shared, OPS[op])
        for path, part in zip(paths, torch.split(flat, [tensors[path].numel() for path in paths]), strict=True):
            tensor = tensors[path]
            target = reduced_dtype(tensor.dtype, op)
            if op == "mean":
                part = part.to(torch.promote_types(part.dtype, target)) / state.world.world_size
            reduced[path] = part.to(target).reshape(tensor.shape).clone()
    return reduced


# -------------------------------------------------------------------------------------------------------------- gather


@frozen
class Shape:
    """What is needed to read a tensor out of bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How many."""
        return math.prod(self.shape) * self.dtype.itemsize


@frozen
class Announcement:
    """What a rank is about to send: its numbers in full, its tensors' shapes."""

    numbers: Mapping[Path, float]
    shapes: Mapping[Path, Shape]


def announce(data: object) -> tuple[Announcement, Tensor]:
    """What will be sent, and its bytes: uint8, on the device of the first tensor."""
    tensors, numbers = split(leaves_of(data))
    shapes = {path: Shape(tensor.dtype, tuple(tensor.shape)) for path, tensor in tensors.items()}
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    pieces = [as_bytes(tensor).to(device) for tensor in tensors.values()]
    return Announcement(numbers, shapes), torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *pieces])


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory, uint8 [n]."""
    return (
        tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )


def read(announced: Announcement, content: Tensor) -> dict[Path, object]:
    """The leaves that were announced, out of their bytes."""
    leaves: dict[Path, object] = dict(announced.numbers)
    start = 0
    for path, shape in announced.shapes.items():
        piece = content[start : start + shape.bytes].clone()  # its own memory, and so aligned
        leaves[path] = piece.view(shape.dtype).reshape(shape.shape)
        start += shape.bytes
    return leaves


def gather_from_ranks(state: RunState, data: object) -> object:
    """Every rank's value, in rank order. Raises ``ValueError`` on every rank when their keys differ."""
    require_set_up(state, "all_gather")
    mine, content = announce(data)
    with naming_peers(state, "all_gather"):
        announced: list[Announcement] = [mine] * state.world.world_size
        dist.all_gather_object(announced, mine)
        check_keys("all_gather", [sorted(map(repr, {**each.numbers, **each.shapes})) for each in announced])
        sizes = [sum(shape.bytes for shape in each.shapes.values()) for each in announced]
        width = max(sizes)
        contents = [content[:0]] * len(sizes)
        if width:
            padded = torch.nn.functional.pad(content, (0, width - len(content)))
            contents = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(contents, padded)
    by_rank = [read(each, received) for each, received in zip(announced, contents, strict=True)]
    return rebuilt(data, {path: [leaves[path] for leaves in by_rank] for path in leaves_of(data)})


def check_keys(operation: str, keys: Sequence[object]) -> None:
    """Every rank sees what all have: they refuse together."""
    if any(other != keys[0] for other in keys):
        seen = "; ".join(f"rank {rank}: {of}" for rank, of in enumerate(keys))
        raise ValueError(f"{operation}: the ranks hold different keys: {seen}. Pass the same ones on every rank.")


# ----------------------------------------------------------------------------------------------------------- broadcast


def send_to_ranks(state: RunState, data: object, src: int) -> object:
    """The value of rank ``src``, on every rank, as a copy."""
    require_set_up(state, "broadcast")
    mine, content = announce(data)
    with naming_peers(state, "broadcast"):
        sent: list[tuple[Announcement, object]] = [(mine, skeleton(data))]
        dist.broadcast_object_list(sent, src=src)
        ((announced, form),) = sent
        total = sum(shape.bytes for shape in announced.shapes.values())
        if state.world.rank != src:
            content = torch.empty(total, dtype=torch.uint8, device=content.device)
        if total:
            dist.broadcast(content, src=src)
    return rebuilt(form, read(announced, content))
