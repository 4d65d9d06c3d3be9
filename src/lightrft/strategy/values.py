"""Values of unknown kind: copies of them that share nothing with the original, and a way to compare and hash them."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping


def owned(value: object) -> object:
    """A copy of ``value`` that shares no mutable state with it: containers and everything else that compares by value.

    An object that compares by identity (a function, a tokenizer, a model) is held as it is: a copy of it would be
    another thing, and perhaps a large one.
    """
    if isinstance(value, Mapping):
        return {key: owned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [owned(item) for item in value]
    if isinstance(value, tuple):
        return tuple(owned(item) for item in value)
    if isinstance(value, set | frozenset):
        return type(value)(value)
    return value if _hashable(value) else copy.deepcopy(value)


def comparable(value: object) -> Hashable:
    """A hashable stand-in, equal for equal contents: lists equal tuples, as they do after JSON, and NaN equals NaN."""
    if isinstance(value, Mapping):
        return "mapping", frozenset((comparable(key), comparable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return "sequence", tuple(comparable(item) for item in value)
    if isinstance(value, set | frozenset):
        return "set", frozenset(value)
    if isinstance(value, float) and value != value:
        return ("nan",)
    # numpy's and torch's arrays and scalars: their == does not answer with one truth value
    if (plain := _as_list(value)) is not value:
        return comparable(plain)
    if _hashable(value):
        return value
    return type(value), comparable(vars(value)) if hasattr(value, "__dict__") else repr(value)


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _as_list(value: object) -> object:
    """What ``tolist`` gives, for the arrays that have it."""
    tolist = None if isinstance(value, type) else getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value
