"""Settings from the outside become typed values when nothing is lost, and otherwise one error that lists them all.

It works on any attrs class. ``structure(SomeConfig, args)`` reads a mapping, an ``argparse.Namespace`` or any object
with attributes. The hooks are strict, where cattrs' own turn 1.7 into 1 and True into 1.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from attrs import NOTHING, Attribute, fields, frozen, has
from cattrs import Converter

from lightrft.errors import ConfigError, listed
from lightrft.strategy.values import contents, owned, shown

if TYPE_CHECKING:
    from attrs import AttrsInstance

T = TypeVar("T")
Field: TypeAlias = "Attribute[Any]"

WITHIN = "within"
"""Key of a field's metadata: the :class:`Within` that its value, or each element of it, lies in."""
REST = "rest"
"""Key of a field's metadata: this field is a mapping that takes every name that is no field."""

TRUE = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE = frozenset({"false", "f", "no", "n", "off", "0"})
NONE = frozenset({"none", "null"})
LARGEST_EXPONENT = 30
"""Of a whole number written as 1e30; a larger one would take the memory of the machine to write out."""


@frozen
class Within:
    """A range of numbers; both ends belong to it unless they are open."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def admits(self, value: object) -> bool:
        """Whether ``value`` lies in the range; a tuple does if its elements do, and None, where allowed, does."""
        if isinstance(value, tuple):
            return all(self.admits(item) for item in value)
        if not isinstance(value, int | float):
            return value is None
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        below = self.high is None or value < self.high or (value == self.high and not self.high_open)
        return above and below

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            bounds = [
                f"{'above' if self.low_open else 'at least'} {self.low}" if self.low is not None else "",
                f"{'below' if self.high_open else 'at most'} {self.high}" if self.high is not None else "",
            ]
            return ", ".join(filter(None, bounds))
        return f"in {'(' if self.low_open else '['}{self.low}, {self.high}{')' if self.high_open else ']'}"


# ------------------------------------------------------------------------------------------------- one value, one type


def _scalar(value: object) -> object:
    """The Python value of a numpy scalar, a zero-dimensional array or tensor, or an enum's member."""
    if isinstance(value, Enum):
        return value.value
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def to_bool(value: object, _: object = bool) -> bool:
    """True and False, 1 and 0, and the words for them."""
    value = _scalar(value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise ValueError(value)


def to_int(value: object, _: object = int) -> int:
    """Whole numbers, written as 8, 8.0, "8", "8.0" or "1e3"; never a truth value."""
    from decimal import Decimal, InvalidOperation

    value = _scalar(value)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            try:
                number = Decimal(value.strip())
            except InvalidOperation:
                raise ValueError(value) from None
        if number.is_finite() and number.adjusted() <= LARGEST_EXPONENT and number == number.to_integral_value():
            return int(number)
    elif isinstance(value, float) and value.is_integer():
        return int(value)
    elif not isinstance(value, bool | float):
        return operator.index(cast("int", value))
    raise ValueError(value)


def to_float(value: object, _: object = float) -> float:
    """Finite numbers, also as text; never a truth value, nor a whole number that a float cannot hold."""
    value = _scalar(value)
    if isinstance(value, bool):
        raise ValueError(value)
    number = float(cast("float", value))
    if not math.isfinite(number) or (isinstance(value, int) and int(number) != value):
        raise ValueError(value)
    return number


def to_str(value: object, _: object = str) -> str:
    """Text, and paths; a number is no text."""
    value = _scalar(value)
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ValueError(value)
    return str(text)


def to_path(value: object, _: object = Path) -> Path:
    """A path, also as text."""
    return Path(to_str(value))


Hook: TypeAlias = Callable[[object, object], object]


def _literal_hook(type_: Any) -> Hook:
    def structure_literal(value: object, _: object) -> object:
        for option in get_args(type_):
            try:
                if CONVERTER.structure(value, type(option)) == option:
                    return option
            except (ValueError, TypeError):
                continue
        raise ValueError(value)

    return structure_literal


def _union_hook(type_: Any) -> Hook:
    optional = NoneType in get_args(type_)
    arms = [arm for arm in get_args(type_) if arm is not NoneType]

    def structure_union(value: object, _: object) -> object:
        if optional and (value is None or (isinstance(value, str) and value.strip().lower() in NONE)):
            return None
        for arm in arms:
            try:
                return CONVERTER.structure(value, arm)
            except (ValueError, TypeError):
                continue
        raise ValueError(value)

    return structure_union


def _tuple_hook(type_: Any) -> Hook:
    arms = get_args(type_)

    def structure_tuple(value: object, _: object) -> object:
        if isinstance(value, str):
            value = re.split(r"[,\s]+", value.strip(" ()[]"))
        # an iterator would be used up, a set has no order
        if isinstance(value, bytes | Mapping | set | frozenset) or not hasattr(value, "__len__"):
            raise ValueError(value)
        items = list(cast("Iterable[object]", value))
        types = [arms[0]] * len(items) if arms[-1] is Ellipsis else arms
        return tuple(CONVERTER.structure(item, arm) for item, arm in zip(items, types, strict=True))

    return structure_tuple


def _attrs_hook(type_: Any) -> Hook:
    return lambda value, _: structure(type_, value)


def _origin(type_: Any) -> object:
    return get_origin(type_)


def _strict_converter() -> Converter:
    converter = Converter(detailed_validation=False)
    hooks: dict[type, Hook] = {bool: to_bool, int: to_int, float: to_float, str: to_str, Path: to_path}
    for type_, hook in hooks.items():
        converter.register_structure_hook(type_, hook)
    converter.register_structure_hook_factory(lambda t: _origin(t) is Literal, _literal_hook)
    converter.register_structure_hook_factory(lambda t: _origin(t) in (Union, UnionType), _union_hook)
    converter.register_structure_hook_factory(lambda t: _origin(t) is tuple, _tuple_hook)
    converter.register_structure_hook_factory(lambda t: isinstance(t, type) and has(t), _attrs_hook)
    return converter


CONVERTER = _strict_converter()
"""cattrs with strict hooks. Raises ``ValueError`` or ``TypeError`` for a value that would lose something."""


# ------------------------------------------------------------------------------------------------------ a whole class


@cache
def settings(cls: type) -> Mapping[str, Field]:
    """The fields that a class is constructed with, by the name that its constructor gives them."""
    return {f.alias or f.name: f for f in fields(cast("type[AttrsInstance]", cls)) if f.init}


@cache
def types_of(cls: type) -> Mapping[str, Any]:
    """The type of each field, its annotation resolved."""
    hints = get_type_hints(cls)
    return {name: hints[f.name] for name, f in settings(cls).items()}


def accepted(type_: Any, within: Within | None = None) -> str:
    """What a field of this type and range takes, in words."""
    origin, arms = get_origin(type_), get_args(type_)
    where = f" {within}" if within else ""
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arms))
    if origin in (Union, UnionType):
        return " or ".join("none" if arm is NoneType else accepted(arm, within) for arm in arms)
    if origin is tuple:
        count = "any number of values" if arms[-1] is Ellipsis else f"{len(arms)} values"
        return f"{count}, each {accepted(arms[0], within)}"
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", Path: "a path"}
    return words.get(type_, getattr(type_, "__name__", str(type_))) + where


def refused(cls: type, problems: Collection[str]) -> ConfigError:
    """The one error that lists every problem."""
    count = "1 setting" if len(problems) == 1 else f"{len(problems)} settings"
    return ConfigError(f"{cls.__name__}: {count} cannot be used:{listed(problems)}")


def checked_values(cls: type, values: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Those of ``values`` that fit, structured, and a line for each that does not."""
    good: dict[str, object] = {}
    problems: list[str] = []
    for name, field in settings(cls).items():
        if name not in values:
            continue
        value, type_, within = values[name], types_of(cls)[name], field.metadata.get(WITHIN)
        try:
            if field.metadata.get(REST):
                good[name] = _rest(cls, value)
                continue
            settled = CONVERTER.structure(value, type_)
        except ConfigError as error:  # of a class within this one: it has its own list
            problems.append(f"{name}: {error}".replace("\n", "\n  "))
        except (ValueError, TypeError, OverflowError):
            problems.append(f"{name}={shown(value)}: accepted is {accepted(type_, within)}")
        else:
            complaint = _complaint(field, settled)
            if within is not None and not within.admits(settled):
                problems.append(f"{name}={shown(value)}: accepted is {accepted(type_, within)}")
            elif complaint:
                problems.append(f"{name}={shown(value)}: {complaint}")
            else:
                good[name] = settled
    return good, problems


def _complaint(field: Field, value: object) -> str:
    """What the field's own attrs validator says of a value, or nothing."""
    if field.validator is not None:
        try:
            field.validator(None, field, value)
        except (ValueError, TypeError) as error:
            return str(error.args[0]) if error.args else "not accepted"
    return ""


def _rest(cls: type, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(value)
    if taken := sorted(value.keys() & settings(cls).keys()):
        raise ConfigError(f"{', '.join(taken)} is a setting of its own: give it by its name")
    return cast("dict[str, object]", owned(value))


def settle(instance: object) -> None:
    """For ``__attrs_post_init__`` of a frozen class: the constructor takes what ``structure`` takes, and no more."""
    cls: type = type(instance)
    values = {name: getattr(instance, f.name) for name, f in settings(cls).items()}
    good, problems = checked_values(cls, values)
    if problems:
        raise refused(cls, problems)
    for name, value in good.items():
        if value is not values[name]:
            object.__setattr__(instance, settings(cls)[name].name, value)


def structure(cls: type[T], args: object) -> T:
    """An instance of the attrs class ``cls`` with the content of ``args``, which stays as it is.

    ``args``: a mapping, an ``argparse.Namespace``, any other object with attributes, or an instance of ``cls``. A name
    that is no field goes to the field marked :data:`REST`, with one warning for all that look misspelt; a class
    without such a field refuses it. Raises ``ConfigError`` with every bad name and value.
    """
    if isinstance(args, cls):
        return args
    known = settings(cast(type, cls))
    rest = next((name for name, field in known.items() if field.metadata.get(REST)), None)
    given: dict[str, object] = {}
    unknown: dict[str, object] = {}
    problems: list[str] = []
    for key, value in contents(args, known).items():
        if not isinstance(key, str):
            problems.append(f"{shown(key)}: a setting's name is text")
            continue
        name = key.replace("-", "_")
        if name in given:
            problems.append(f"{key}: given twice, also as {name}")
        elif name in known:
            given[name] = value
        else:
            unknown[key] = value
    hints = {name: near for name in unknown if (near := nearest(name, known.keys() - {rest}))}
    if rest is None:
        problems += [f"{name}: no such setting{_did_you_mean(hints.get(name))}" for name in unknown]
    elif unknown and isinstance(given.get(rest, {}), Mapping):
        given[rest] = {**cast("Mapping[str, object]", given.get(rest, {})), **unknown}
    good, bad = checked_values(cls, given)
    if problems or bad:
        raise refused(cls, [*problems, *bad])
    missing = [name for name, field in known.items() if field.default is NOTHING and name not in good]
    if missing:
        raise refused(cls, [f"{name}: missing" for name in missing])
    if rest is not None and hints:
        _warn_of_misspelt(hints, rest)
    return cls(**good)


# ---------------------------------------------------------------------------------------------------- misspelt names


def nearest(name: str, names: Collection[str]) -> str | None:
    """The one of ``names`` that ``name`` looks like a misspelling of, or None."""
    from difflib import get_close_matches

    def bare(text: str) -> str:
        return text.lower().replace("_", "").replace("-", "")

    # Letters swapped, as in max_nrom or zgp; else nearly the same letters and length, so that
    # rollout_batch_size, a name of its own, is not taken for micro_rollout_batch_size.
    swapped = [other for other in sorted(names) if sorted(bare(other)) == sorted(bare(name))]
    similar = [other for other in sorted(names) if abs(len(other) - len(name)) <= 2]
    return next(iter(swapped or get_close_matches(name, similar, n=1, cutoff=0.85)), None)


def _did_you_mean(name: str | None) -> str:
    return f"; did you mean {name}?" if name else ""


def _warn_of_misspelt(hints: Mapping[str, str], rest: str) -> None:
    import warnings

    pairs = ", ".join(f"{name} (did you mean {near}?)" for name, near in hints.items())
    warnings.warn(f"No such setting: {pairs}. Kept in {rest}, where nothing but your own code reads it.", stacklevel=4)
