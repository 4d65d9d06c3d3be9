"""Values of unknown kind: what an object holds, copies of it that share nothing, a way to compare and hash them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Mapping
from types import MemberDescriptorType

from lightrft.errors import ConfigError


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


def shown(value: object) -> str:
    """``repr``, cut to the length of half a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def contents(args: object, wanted: Collection[str]) -> Mapping[object, object]:
    """What ``args`` holds, by name: a mapping's items, or attributes of the object and of its class, not its methods.

    A property is computed only if it is one of the names ``wanted``: those of other libraries' classes may do anything.
    """
    from argparse import Namespace

    if isinstance(args, Mapping):
        return args
    if isinstance(args, Namespace):
        return {str(name): value for name, value in vars(args).items()}
    if args is None or isinstance(args, str | bytes | int | float | complex | list | tuple | set | frozenset):
        raise ConfigError(
            f"Settings cannot be read from {shown(args)} of type {type(args).__name__}: "
            "give a mapping, an argparse.Namespace or an object with attributes."
        )
    found: dict[object, object] = {}
    is_class = isinstance(args, type)
    for cls in reversed((args if isinstance(args, type) else type(args)).__mro__[:-1]):
        for name, member in vars(cls).items():
            # slots and properties answer through the object; what else has __get__ is a method of some kind
            if isinstance(member, MemberDescriptorType) or (isinstance(member, property) and name in wanted):
                if not is_class and hasattr(args, name):
                    found[name] = getattr(args, name)
            elif not hasattr(type(member), "__get__"):
                found[name] = member
    if not is_class:
        found.update(getattr(args, "__dict__", {}))
    return {name: value for name, value in found.items() if not str(name).startswith("_")}
