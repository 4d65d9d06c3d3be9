"""Tensors in a safetensors file, of any dtype and layout that is dense, with the names that share one storage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from attrs import field, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightrft.checkpoints.checksums import FileEntry, Fill, write_chunks
from lightrft.checkpoints.reading import Read, as_it_is
from lightrft.errors import CheckpointError

_HEADER = "lightrft"
_METADATA = "__metadata__"
# What every reader of safetensors files knows. All else is stored as its bytes, with dtype and shape in the header.
_COMMON = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@frozen
class TensorFile:
    """What a file holds: tensors on the CPU by name, and for each alias the name of the tensor that it is."""

    tensors: dict[str, Tensor] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)

    def named(self) -> dict[str, Tensor]:
        """All names, aliases included."""
        return {**self.tensors, **{alias: self.tensors[name] for alias, name in self.aliases.items()}}


def unstorable(tensor: Tensor) -> str | None:
    """Why ``tensor`` cannot be stored, or None if it can."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return "it is not a dense tensor"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    return None


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements of the same memory."""
    if tensor.numel() == 0 or tensor.is_meta:
        return (id(tensor),)
    meaning = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), meaning, tuple(tensor.shape), tensor.stride())


def write_tensors(path: Path | None, tensors: Mapping[str, Tensor], read: Read = as_it_is) -> FileEntry | None:
    """Writes ``tensors`` to ``path``: those that are the same memory once, under the first name (K8). Returns its entry.

    ``read`` gives the values of a tensor when its bytes are written: once for each that is stored, in the order of the
    file, which depends on nothing but the order and the dtypes in ``tensors``. Without a ``path`` nothing is written, and
    all is read in that order. In memory are, beside what was there, one tensor that was read and some chunks of the file.

    Raises ``CheckpointError`` for what cannot be stored, what ``read`` raises, and the ``OSError`` of the file system.
    """
    plan = _planned(tensors)
    if path is None:
        for tensor in plan.stored.values():
            read(tensor)
        return None
    header = _header(path, plan)
    parts = _parts(path, header, plan, read)
    entry = write_chunks(path, len(header) + sum(map(_bytes_of, plan.stored.values())), _filling(parts))
    for _ in parts:  # the last may have no bytes, but the other ranks read them
        pass
    return entry


def read_tensors(path: Path) -> TensorFile:
    """What :func:`write_tensors` wrote, or any safetensors file. The tensors own no memory: they are views of the file.

    Raises ``CheckpointError`` naming the path if it is missing or is not what it should be. No code is run (K9).
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
            raw, aliases = header.get("raw", {}), header.get("aliases", {})
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
        tensors = {name: _from_bytes(stored[name], **raw[name]) if name in raw else stored[name] for name in stored}
        if not set(aliases.values()) <= tensors.keys():
            raise ValueError("an alias names a tensor that is not there")
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return TensorFile(tensors, aliases)


# --- writing


@frozen(eq=False)
class _Plan:
    """What goes into a file, in its order, and which names are the same tensor."""

    stored: dict[str, Tensor]
    aliases: dict[str, str]


def _planned(tensors: Mapping[str, Tensor]) -> _Plan:
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    kept: list[tuple[str, Tensor]] = []
    for name, tensor in tensors.items():
        if not tensor.is_meta and (problem := unstorable(tensor)):
            raise CheckpointError(f"cannot store {name!r}: {problem}")
        holder = first.setdefault(storage_key(tensor), name)
        if holder == name:
            kept.append((name, tensor))
        else:
            aliases[name] = holder
    # Wide elements first: all are aligned, as readers that map the file need it.
    return _Plan(dict(sorted(kept, key=_width, reverse=True)), aliases)


def _width(item: tuple[str, Tensor]) -> int:
    return item[1].element_size()


def _bytes_of(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


def _header(path: Path, plan: _Plan) -> bytes:
    """Length and JSON, as the format wants them: https://github.com/huggingface/safetensors#format."""
    raw: dict[str, object] = {}
    entries: dict[str, object] = {}
    begin = 0
    for name, tensor in plan.stored.items():
        if name == _METADATA:
            raise CheckpointError(f"cannot write {path}: no tensor can be called {name!r} in a safetensors file")
        end = begin + _bytes_of(tensor)
        dtype, shape = _COMMON.get(tensor.dtype), list(tensor.shape)
        if dtype is None:
            raw[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}
            dtype, shape = "U8", [end - begin]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    ours = json.dumps({"aliases": plan.aliases, "raw": raw})
    body = json.dumps({_METADATA: {"format": "pt", _HEADER: ours}, **entries}, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _parts(path: Path, header: bytes, plan: _Plan, read: Read) -> Iterator[Tensor]:
    """The bytes of the file. No tensor is held here while the next is read."""
    yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for name, tensor in plan.stored.items():
        yield _as_bytes(_checked(path, name, tensor, read(tensor)))


def _checked(path: Path, name: str, expected: Tensor, values: Tensor) -> Tensor:
    if problem := unstorable(values):
        raise CheckpointError(f"cannot write {name!r} to {path}: {problem}")
    if values.dtype != expected.dtype or values.shape != expected.shape:
        raise CheckpointError(
            f"cannot write {name!r} to {path}: announced as {expected.dtype} of shape {tuple(expected.shape)}, "
            f"it was read as {values.dtype} of shape {tuple(values.shape)}. It must not change during a save."
        )
    return values


def _as_bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    plain = tensor.resolve_neg().contiguous()
    # One element counts as contiguous whatever its stride is, but can be viewed as bytes only if that is 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _filling(parts: Iterator[Tensor]) -> Fill:
    """Copies the bytes of ``parts``, from whatever device, into the chunks that it is given."""
    nothing = torch.empty(0, dtype=torch.uint8)
    rest = nothing

    def fill(chunk: memoryview) -> None:
        nonlocal rest
        target = torch.frombuffer(chunk, dtype=torch.uint8)
        while len(target):
            if not len(rest):
                rest = nothing  # frees what was read before the next is
                rest = next(parts)
            count = min(len(target), len(rest))
            target[:count].copy_(rest[:count])
            target, rest = target[count:], rest[count:]

    return fill


# --- reading


def _from_bytes(stored: Tensor, *, dtype: str, shape: list[int]) -> Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    # Views need an aligned start, which a position in a file does not promise.
    return stored.clone().view(kind).reshape(shape)
