"""Settings from files and command lines: TOML, JSON, argparse and tyro, all made from the same attrs classes."""

from __future__ import annotations

import ast
import inspect
import json
import os
import textwrap
import tomllib
from argparse import ArgumentError, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from lightrft.errors import ConfigError, listed
from lightrft.strategy.config import DEFAULTS, Group, StrategyConfig, group_of
from lightrft.strategy.structuring import CONVERTER, WITHIN, accepted, settings, types_of

T = TypeVar("T")


# -------------------------------------------------------------------------------------------------------------- files


def load_config_file(path: str | os.PathLike[str]) -> dict[str, object]:
    """The content of a TOML or JSON file. Raises ``ConfigError`` naming the file, and the line of what is malformed."""
    path = Path(path)
    readers: dict[str, Callable[[str], object]] = {".toml": tomllib.loads, ".json": _json}
    if path.suffix.lower() not in readers:
        raise ConfigError(f"{path}: a configuration file is named .toml or .json.")
    try:
        content = readers[path.suffix.lower()](path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}).") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is malformed: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a configuration is a JSON object, and this is a {type(content).__name__}.")
    return content


def _json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """TOML refuses a key that is given twice; JSON would keep the last one."""
    seen: dict[str, object] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} is given twice")
        seen[key] = value
    return seen


def dump_toml(values: Mapping[str, object]) -> str:
    """``values`` as TOML text, say those of ``to_dict(config)``.

    None has no spelling in TOML and is left out. Paths become text, tuples arrays, and numpy's scalars and arrays
    Python's. Raises ``ConfigError`` naming every value that TOML cannot hold.
    """
    import tomli_w

    problems: list[str] = []
    plain = _plain_table(values, "", problems)
    if problems:
        raise ConfigError(f"TOML cannot hold these values:{listed(problems)}")
    return tomli_w.dumps(plain)


def _plain_table(values: Mapping[Any, object], where: str, problems: list[str]) -> dict[str, object]:
    problems += [f"{where}{key!r}: a key is text" for key in values if not isinstance(key, str)]
    return {str(k): _plain(v, f"{where}{k}", problems) for k, v in values.items() if v is not None}


def _plain(value: object, where: str, problems: list[str]) -> object:
    from datetime import date, datetime, time

    tolist = getattr(value, "tolist", None)
    if isinstance(value, Enum):
        return _plain(value.value, where, problems)
    if isinstance(value, Mapping):
        return _plain_table(value, f"{where}.", problems)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]", problems) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(tolist) and not isinstance(value, type):
        return _plain(tolist(), where, problems)
    if not isinstance(value, bool | int | float | str | datetime | date | time):
        problems.append(f"{where}={value!r} of type {type(value).__name__}")
    return value


# -------------------------------------------------------------------------------------------------------------- flags


@cache
def field_help(cls: type) -> Mapping[str, str]:
    """The docstring beneath each field of a class, by field name; empty where the source is not at hand."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, SyntaxError):
        return {}
    if not isinstance(body, ast.ClassDef):
        return {}
    return {
        this.target.id: inspect.cleandoc(after.value.value)
        for this, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


def add_arguments(parser: ArgumentParser) -> None:
    """A flag for every field of ``StrategyConfig``, with underscores and with dashes, grouped, with help and default.

    ``StrategyConfig.from_args(parser.parse_args([])) == StrategyConfig()``. A flag that the parser already has stays as
    it is.
    """
    groups = {group: parser.add_argument_group(group) for group in get_args(Group)}
    help_of = field_help(StrategyConfig)
    for name, default in DEFAULTS.items():
        flags = list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))
        words = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"{help_of.get(name, '')} (default: {words})".replace("%", "%%").strip()
        add = groups[group_of(name)].add_argument
        type_ = types_of(StrategyConfig)[name]
        try:
            if type_ is bool:
                add(*flags, dest=name, action=BooleanOptionalAction, default=default, help=text)
            elif isinstance(default, tuple):
                one, count = get_args(type_)[0], len(default)
                parse, metavar = _parser_of(name, one), _metavar(one)
                add(*flags, dest=name, type=parse, nargs=count, default=default, metavar=metavar, help=text)
            else:
                parse, metavar = _parser_of(name, type_), _metavar(type_)
                add(*flags, dest=name, type=parse, default=default, metavar=metavar, help=text)
        except ArgumentError:
            continue


def _parser_of(name: str, type_: Any) -> Callable[[str], object]:
    """The conversion of one flag's text; argparse shows its message and ends with exit code 2."""
    within = settings(StrategyConfig)[name].metadata.get(WITHIN)

    def parse(text: str) -> object:
        try:
            value = CONVERTER.structure(text, type_)
        except (ValueError, TypeError):
            value = ...
        if value is ... or not (within is None or within.admits(value)):
            raise ArgumentTypeError(f"{text!r}: accepted is {accepted(type_, within)}")
        return value

    return parse


def _metavar(type_: Any) -> str:
    if get_origin(type_) is Literal:
        return "{" + ",".join(map(str, get_args(type_))) + "}"
    arms = [arm for arm in get_args(type_) if arm is not NoneType]
    return _metavar(arms[0]) if arms else getattr(type_, "__name__", "value").upper()


def parse_flags(
    cls: type[T],
    args: Sequence[str] | None = None,
    *,
    default: T | None = None,
    prog: str | None = None,
    description: str | None = None,
    prefixes: bool = True,
    positional: bool = False,
) -> T:
    """An attrs class from a command line, by tyro: a flag for each field, help from its docstring.

    ``args``: the words of the command line, None for the process's own. ``default``: what the flags override, say the
    content of a file. ``prefixes`` False: ``--seed`` for a nested class's field, in place of ``--strategy.seed``.
    ``positional``: fields without a default are words without a flag. A word that cannot be used ends the program with
    exit code 2 and a message that names it.
    """
    import tyro

    # what cannot be written on a command line (extra_args) makes no flag
    config = (
        tyro.conf.SuppressFixed,
        *(() if prefixes else (tyro.conf.OmitArgPrefixes,)),
        *((tyro.conf.PositionalRequiredArgs,) if positional else ()),
    )
    if default is None:
        return tyro.cli(cls, args=args, prog=prog, description=description, config=config)
    return tyro.cli(cls, args=args, default=default, prog=prog, description=description, config=config)
