"""Values as Python source, to be pasted into a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor


def as_source(value: object) -> str:
    """An expression that evaluates to ``value``, with ``torch`` and ``np`` imported."""
    if isinstance(value, Tensor):
        flat = as_source(value.detach().cpu().reshape(-1).tolist())
        shape = "" if value.ndim == 1 else f".reshape({tuple(value.shape)})"
        return f"torch.tensor({flat}, dtype={value.dtype}){shape}"
    if type(value) is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if type(value) is complex:
        return f"complex({as_source(value.real)}, {as_source(value.imag)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_source(key)}: {as_source(inner)}" for key, inner in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(map(as_source, value)) + "]"
    if type(value) is tuple:
        return "(" + ", ".join(map(as_source, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def name_of(function: Callable[..., object], *, qualified: bool = True) -> str:
    """What a build function is called, with its module or without."""
    name: str = getattr(function, "__qualname__", type(function).__name__)
    module: str = getattr(function, "__module__", "")
    return f"{module}:{name}" if qualified and module else name
