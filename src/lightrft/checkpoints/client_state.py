"""Python values as JSON plus tensors, and back, equal and of the same types. Nothing is ever unpickled (law K9).

JSON has no tuples, no non-finite numbers, no keys but strings. What it lacks is an object with the key ``$`` that names
the kind::

    {"$": "tuple", "items": [1, 2]}      {"$": "tensor", "key": "actor/ema", "requires_grad": false, ...}

A value that cannot be stored is a ``TypeError`` when it is saved, never a surprise when it is loaded (FC30).
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from lightrft.checkpoints.checksums import FileEntry
from lightrft.checkpoints.reading import Read, as_it_is
from lightrft.checkpoints.tensors import read_tensors, unstorable, write_tensors
from lightrft.errors import CheckpointError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_KIND = "$"
_DEEPEST = 100
_SAFE_INT = 2**63
_NUMPY_KINDS = frozenset("biufcSUMm")
_CAN = (
    "Can be saved: None, bool, int, float, str, bytes, Path, numpy scalars and arrays, torch tensors, and list, tuple, "
    "dict, OrderedDict, Counter of these. Convert it first, or leave it out."
)


def encode(value: object, name: str, tensors: dict[str, Tensor], at: str = "", *, in_place: bool = False) -> Json:
    """``value`` as JSON. Tensors and arrays are added to ``tensors`` under keys that begin with ``at``.

    ``in_place``: tensors are added as they are, on whatever device, for a writer that reads each when its turn comes.

    ``name`` is what an error calls the value: ``client_state['a'][0]: object of type Lock cannot be saved``.
    Tensors on the CPU are not copied: write them before they change.
    Raises ``TypeError`` for anything that :func:`decode` could not give back equal. Subclasses are no exception: a
    namedtuple would come back as a tuple.
    """
    return _encode(value, name, tensors, at, 0, in_place)


def _encode(value: object, name: str, tensors: dict[str, Tensor], at: str, depth: int, in_place: bool = False) -> Json:
    if depth > _DEEPEST:
        raise TypeError(f"{name}: nested deeper than {_DEEPEST} levels, or contains itself. Flatten it.")

    def inner(child: object, key: object) -> Json:
        return _encode(child, f"{name}[{key!r}]", tensors, f"{at}/{key}" if at else str(key), depth + 1, in_place)

    kind = type(value)
    if value is None or isinstance(value, bool):
        return value
    if kind is str:
        return str(value)
    if kind is int and isinstance(value, int):
        # Python reads and prints decimal numbers only up to a limit of digits.
        return value if abs(value) < _SAFE_INT else {_KIND: "int", "hex": hex(value)}
    if kind is float and isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "bits": struct.pack(">d", value).hex()}
    if kind is list and isinstance(value, list):
        return [inner(item, index) for index, item in enumerate(value)]
    if kind is tuple and isinstance(value, tuple):
        return {_KIND: "tuple", "items": [inner(item, index) for index, item in enumerate(value)]}
    if kind is dict and isinstance(value, dict) and all(type(key) is str for key in value) and _KIND not in value:
        return {key: inner(item, key) for key, item in value.items()}
    if kind in (dict, OrderedDict, Counter) and isinstance(value, dict):
        pairs: list[Json] = [[_encode_key(key, name), inner(item, key)] for key, item in value.items()]
        return {_KIND: kind.__name__, "pairs": pairs}
    if kind is bytes and isinstance(value, bytes):
        return {_KIND: "bytes", "base64": _base64(value)}
    if isinstance(value, Path):
        return {_KIND: "path", "path": str(value)}
    if kind in (np.str_, np.bytes_) and isinstance(value, (str, bytes)):
        # Their own bytes would lose NULs at the end.
        plain: Json = str(value) if isinstance(value, str) else {_KIND: "bytes", "base64": _base64(bytes(value))}
        return {_KIND: "numpy_text", "plain": plain}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return {_KIND: "numpy", "dtype": value.dtype.str, "base64": _base64(value.tobytes())}
    if kind is np.ndarray and isinstance(value, np.ndarray) and value.dtype.kind in _NUMPY_KINDS:
        stored = (
            torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            if value.nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        shape: list[Json] = list(value.shape)
        return {_KIND: "array", "dtype": value.dtype.str, "shape": shape, "key": _add(tensors, at, stored)}
    if kind in (Tensor, Parameter) and isinstance(value, Tensor):
        if (problem := unstorable(value)) and not in_place:
            raise TypeError(f"{name}: this tensor cannot be saved: {problem}")
        flags: dict[str, Json] = {"parameter": kind is Parameter, "requires_grad": value.requires_grad}
        return {_KIND: "tensor", "key": _add(tensors, at, value if in_place else value.detach().cpu()), **flags}
    raise TypeError(f"{name}: object of type {kind.__module__}.{kind.__qualname__} cannot be saved. {_CAN}")


def _encode_key(key: object, name: str) -> Json:
    if key is None or type(key) in (bool, int, float, str, bytes):
        return _encode(key, name, {}, "", 0)
    if isinstance(key, tuple) and type(key) is tuple:
        return {_KIND: "tuple", "items": [_encode_key(part, name) for part in key]}
    raise TypeError(
        f"{name}: a dict key of type {type(key).__qualname__} cannot be saved: {key!r}. Use keys of type str or int."
    )


def decode(tree: Json, tensors: Mapping[str, Tensor]) -> object:
    """What was given to :func:`encode`, tensors on the CPU and owning their memory. ``ValueError`` if malformed."""
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _KIND not in tree:
        return {key: decode(item, tensors) for key, item in tree.items()}
    kind = tree[_KIND]
    if not isinstance(kind, str) or kind not in _DECODERS:
        raise ValueError(f"a value of unknown kind {kind!r}")
    return _DECODERS[kind](tree, tensors)


def _tuple(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
    return tuple(decode(item, tensors) for item in _list(tree["items"]))


def _pairs(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> list[tuple[object, object]]:
    pairs = []
    for pair in _list(tree["pairs"]):
        key, value = _list(pair)
        pairs.append((decode(key, tensors), decode(value, tensors)))
    return pairs


def _dict(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> dict[object, object]:
    return dict(_pairs(tree, tensors))


def _ordered(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> OrderedDict[object, object]:
    return OrderedDict(_pairs(tree, tensors))


def _counter(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> Counter[object]:
    return Counter(cast("dict[object, int]", _dict(tree, tensors)))


def _int(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> int:
    return int(_str(tree["hex"]), 16)


def _float(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(_str(tree["bits"])))[0]
    return value


def _bytes(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> bytes:
    return base64.b64decode(_str(tree["base64"]), validate=True)


def _path(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> Path:
    return Path(_str(tree["path"]))


def _scalar(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> object:
    scalar: object = np.frombuffer(_bytes(tree, tensors), _dtype(tree["dtype"]))[0]
    return scalar


def _text(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> object:
    plain = decode(tree["plain"], tensors)
    return np.str_(plain) if isinstance(plain, str) else np.bytes_(plain)


def _array(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    shape = [length for length in _list(tree["shape"]) if isinstance(length, int)]
    dtype, stored = _dtype(tree["dtype"]), tensors[_str(tree["key"])]
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = np.zeros(shape, dtype)
    if stored.numel():
        array[...] = np.frombuffer(stored.numpy().tobytes(), dtype).reshape(shape)
    return array


def _tensor(tree: dict[str, Json], tensors: Mapping[str, Tensor]) -> Tensor:
    value, requires_grad = tensors[_str(tree["key"])].clone(), bool(tree["requires_grad"])
    return Parameter(value, requires_grad) if tree["parameter"] else value.requires_grad_(requires_grad)


_DECODERS: Mapping[str, Callable[[dict[str, Json], Mapping[str, Tensor]], object]] = {
    "tuple": _tuple,
    "dict": _dict,
    "OrderedDict": _ordered,
    "Counter": _counter,
    "int": _int,
    "float": _float,
    "bytes": _bytes,
    "path": _path,
    "numpy": _scalar,
    "numpy_text": _text,
    "array": _array,
    "tensor": _tensor,
}


def write_value(
    file: Path | None, tree: Json, tensors: Mapping[str, Tensor], read: Read = as_it_is
) -> FileEntry | None:
    """Writes ``tree`` to ``file``, a ``.json``, and ``tensors``, if any, to the ``.safetensors`` beside it, whose entry it
    returns.

    ``read``, and what no ``file`` means: as in :func:`write_tensors`.
    """
    if file is not None:
        file.write_text(json.dumps(tree, allow_nan=False), encoding="ascii")
    if not tensors:
        return None
    return write_tensors(None if file is None else file.with_suffix(".safetensors"), tensors, read)


def read_value(file: Path) -> object:
    """The value that :func:`write_value` wrote; ``CheckpointError`` naming the file if that is not possible."""
    beside = file.with_suffix(".safetensors")
    tensors = read_tensors(beside).named() if beside.exists() else {}
    try:
        return decode(json.loads(file.read_text(encoding="ascii")), tensors)
    except (OSError, ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {type(error).__name__}: {error}") from error


def read_mapping(file: Path, otherwise: str = "") -> dict[str, object]:
    """Like :func:`read_value`, for a dict at the top. ``otherwise`` is the advice for when there is no such file."""
    if not file.exists():
        raise CheckpointError(
            f"{file} does not exist: it was not saved.{f' To go on without it, {otherwise}.' * bool(otherwise)}"
        )
    value = read_value(file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not a mapping")
    return value


def _add(tensors: dict[str, Tensor], at: str, tensor: Tensor) -> str:
    """Adds ``tensor`` under a key of its own. Keys are for people; which is whose is in the JSON."""
    key = at if at.isprintable() and len(at) < 1000 else f"tensor{len(tensors)}"
    while key in tensors or key in ("", "__metadata__"):
        key += "#"
    tensors[key] = tensor
    return key


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _dtype(text: Json) -> np.dtype[np.generic]:
    dtype = np.dtype(_str(text))
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {text!r} is not allowed")
    return dtype


def _str(tree: Json) -> str:
    if not isinstance(tree, str):
        raise TypeError(f"expected a string, not {tree!r:.100}")
    return tree


def _list(tree: Json) -> list[Json]:
    if not isinstance(tree, list):
        raise TypeError(f"expected a list, not {tree!r:.100}")
    return tree
