"""What is looked at before any law: that there is a build function, and that what it builds is a ``Strategy``.

A law's body would fail on anything else in ways that say nothing to the author of a backend.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import cast, get_overloads

import torch
from attrs import frozen
from typing_extensions import get_protocol_members

from lightrft.conformance.probes import changed_environment
from lightrft.errors import ConfigError
from lightrft.strategy import protocol
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import BuildStrategy, Strategy
from lightrft.strategy.strategy import backend_builder

FACTS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "object": (object,),
    "StrategyConfig": (StrategyConfig,),
    "torch.device": (torch.device,),
}
"""What a fact may be, by its annotation in the Protocol."""


def load_build(name: str) -> BuildStrategy:
    """The build function of a backend: by the backend's name, or as ``package.module:function``.

    Raises ``ConfigError`` when there is none.
    """
    if ":" not in name:
        return backend_builder(name)
    return cast(
        "BuildStrategy",
        load_attribute(name, "backend", "build(config: StrategyConfig, args: object = None) -> Strategy"),
    )


def load_attribute(name: str, what: str, signature: str) -> Callable[..., object]:
    """What ``package.module:function`` names. Raises ``ConfigError``."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: it may lie where its author stands
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}. "
            f"Give it as package.module:function, and run this where `import {module_name}` works."
        ) from error
    found: object = getattr(module, attribute, None)
    if not callable(found):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        seen = "nothing of that name" if found is None else f"a {type(found).__name__}, which cannot be called"
        hint = f" Did you mean {module_name}:{near[0]}?" if near and found is None else ""
        raise ConfigError(f"{what} {name!r}: {module_name} has {seen}.{hint} Name a function {signature}.")
    return found


@frozen
class Built:
    """What was seen of a backend on one rank: sentences about what is wrong."""

    misfits: Sequence[str]
    """Why it is no ``Strategy``: then no law can be checked."""
    misconduct: Sequence[str]
    """What it did that nobody asked for."""


def examine_build(build: BuildStrategy, fields: Mapping[str, object]) -> Built:
    """Builds, sets up and closes once, and looks. What ``build`` raises goes through."""
    config = StrategyConfig.from_args({"bf16": False, **fields})
    args = Namespace(prompts=["a"], nested={"depth": 1})
    before, environment, children = deepcopy(vars(args)), dict(os.environ), processes()
    with standard_output() as printed:
        strategy: object = build(config, args)
        misfits = misfits_of(strategy)
        if misfits:
            return Built(misfits, ())
        built = cast("Strategy", strategy)
        built.setup_distributed()
        built.close()
    misconduct = []
    if vars(args) != before:
        misconduct.append(f"it changed the args that it was given: {before} became {vars(args)}.")
    if text := printed():
        misconduct.append(f"it printed {text[:200]!r} to standard output: log it instead.")
    if left := processes() - children:
        misconduct.append(f"it left processes behind after close(): {', '.join(map(str, sorted(left)))}.")
    if changed := changed_environment(environment):
        misconduct.append(f"it changed environment variables: {', '.join(changed)}.")
    return Built((), misconduct)


# ------------------------------------------------------------------------------------------------------------- members


def misfits_of(strategy: object) -> list[str]:
    """How an object differs from the ``Strategy`` Protocol, as far as it can be seen without calling it."""
    found = []
    for name in sorted(get_protocol_members(Strategy)):
        member = getattr(Strategy, name)
        annotation: str = member.fget.__annotations__["return"]
        try:
            value: object = getattr(strategy, name)
        except Exception as error:
            near = difflib.get_close_matches(name, dir(strategy), n=1)
            hint = f" (it has {near[0]})" if near and near[0] != name else ""
            told = "it is missing" if isinstance(error, AttributeError) else f"{type(error).__name__}: {error}"
            found.append(f"{name}: {annotation}: {told}{hint}")
            continue
        if annotation in FACTS:
            if not isinstance(value, FACTS[annotation]):
                found.append(f"{name}: {annotation}: it is a {type(value).__name__}, {value!r:.60}")
        elif not callable(value):
            found.append(f"{name}: {annotation}: it is a {type(value).__name__}, which cannot be called")
        else:
            found += misfits_of_call(name, value, getattr(protocol, annotation))
    return found


def misfits_of_call(name: str, function: Callable[..., object], callback: type) -> list[str]:
    """Which of the calls that the Protocol allows ``function`` would not take."""
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):  # in C, say: nothing to be seen
        return []
    for declared in declared_calls(callback):
        parameters = list(inspect.signature(declared).parameters.values())[1:]
        by_place = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        named = {p.name: None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
        needed = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
        only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        for args, kwargs in ((by_place, by_name), (only, named | by_name), (needed, {})):
            try:
                bound = own.bind(*args, **kwargs)
            except TypeError as error:
                shown = ", ".join(map(str, parameters))
                return [f"{name}({shown}): its signature is {name}{own}: {error}"]
            misplaced = [place for place in by_place if args is by_place and bound.arguments.get(place, place) != place]
            if misplaced:
                return [f"{name}: {', '.join(misplaced)} in another order: its signature is {name}{own}"]
    return []


def declared_calls(callback: type) -> Sequence[Callable[..., object]]:
    """The overloads of a callback Protocol, or its one call."""

    def overloaded() -> None:
        """What ``get_overloads`` looks up is a name; of overloads without a body Python keeps no function that has it."""

    overloaded.__module__, overloaded.__qualname__ = callback.__module__, f"{callback.__qualname__}.__call__"
    return get_overloads(overloaded) or [callback.__call__]


# ------------------------------------------------------------------------------------------------------------- conduct


def processes() -> set[int]:
    """The children of this process that live."""
    found = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    tasks = "/proc/self/task"
    if os.path.isdir(tasks):  # Linux tells of those too that were not started by multiprocessing
        for task in os.listdir(tasks):
            try:
                with open(f"{tasks}/{task}/children") as file:
                    found |= {int(pid) for pid in file.read().split()}
            except OSError:
                continue  # the thread has ended
    return found


@contextmanager
def standard_output() -> Iterator[Callable[[], str]]:
    """What is written to standard output inside, by Python or by what lies beneath; it is not shown."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        text = ""
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: text
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            text = file.read()
