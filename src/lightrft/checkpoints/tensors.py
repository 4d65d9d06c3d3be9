"""Tensors in a safetensors file, of any dtype and layout that is dense, with the names that share one storage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import field, frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightrft.errors import CheckpointError

_HEADER = "lightrft"
# What every reader of safetensors files knows. All else is stored as its bytes, with dtype and shape in the header.
_COMMON = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
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
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes ``tensors`` to ``path``: those that are the same memory once, under the first name (K8)."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    raw: dict[str, dict[str, object]] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        holder = first.setdefault(storage_key(tensor), name)
        if holder != name:
            aliases[name] = holder
            continue
        kept[name] = tensor.detach()
    sharers = Counter(tensor.untyped_storage().data_ptr() for tensor in kept.values())
    for name, tensor in kept.items():
        if tensor.dtype not in _COMMON:
            raw[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            kept[name] = _as_bytes(tensor)
        elif not tensor.is_contiguous() or sharers[tensor.untyped_storage().data_ptr()] > 1:
            # The writer refuses views that overlap.
            kept[name] = tensor.clone(memory_format=torch.contiguous_format)
    header = {"format": "pt", _HEADER: json.dumps({"aliases": aliases, "raw": raw})}
    try:
        save_file(kept, path, metadata=header)
    except SafetensorError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


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


def _as_bytes(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    flat = tensor.resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).clone()


def _from_bytes(stored: Tensor, *, dtype: str, shape: list[int]) -> Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    # Views need an aligned start, which a position in a file does not promise.
    return stored.clone().view(kind).reshape(shape)
