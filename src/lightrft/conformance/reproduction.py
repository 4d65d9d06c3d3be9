"""A failure as a Python test: what a report gives to paste, and what such a test calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightrft.conformance.differential import compare_on
from lightrft.conformance.law import Law, Target, run_example, slug
from lightrft.conformance.laws import LAWS
from lightrft.conformance.pool import rank_pool
from lightrft.conformance.program import Program
from lightrft.conformance.source import as_source, name_of
from lightrft.conformance.stateful import check_program
from lightrft.errors import ConfigError
from lightrft.strategy.protocol import BuildStrategy

TIMEOUT_S = 120.0


def check_example(
    law: str,
    build: BuildStrategy,
    *,
    world_size: int = 1,
    fields: Mapping[str, object] | None = None,
    values: Mapping[str, object] | None = None,
    laws: Sequence[Law] = LAWS,
) -> None:
    """Raises what the law of that name raises for these values, on ranks in processes of their own."""
    found = next((each for each in laws if each.name == law), None)
    if found is None:
        raise ConfigError(f"there is no law {law!r}. `lightrft conformance --list` shows them.")
    target = Target(name=name_of(build), build=build, world_size=world_size, fields=fields or {})
    with rank_pool(world_size, timeout=TIMEOUT_S) as pool:
        run_example(found, target, pool, values or {})


def check_program_on(
    program: Program,
    build: BuildStrategy,
    *,
    world_size: int = 1,
    fields: Mapping[str, object] | None = None,
    against: BuildStrategy | None = None,
) -> None:
    """Raises where a program does not come out as its model says, or as on one rank of the backend ``against``."""
    target = Target(name=name_of(build), build=build, world_size=world_size, fields=fields or {})
    with rank_pool(world_size, timeout=TIMEOUT_S) as pool:
        if against is None:
            check_program(target, pool, program)
        else:
            with rank_pool(1, timeout=TIMEOUT_S) as other:
                compare_on(target, Target(name=name_of(against), build=against), pool, other, program)


def law_as_test(law: Law, target: Target, values: Mapping[str, object]) -> str:
    """A test that fails as a law did."""
    shown = as_source(dict(values))
    imports = [f"import {name}" for name in ("numpy as np", "torch") if f"{name.split()[-1]}." in shown]
    given = [f"values={shown}"] if values else []
    return test_source("check_example", law.name, repr(law.name), target, given, imports)


def program_as_test(name: str, target: Target, program: Program, reference: Target | None = None) -> str:
    """A test that fails as a program did."""
    imports = ["from lightrft.conformance.program import *"]
    given = []
    if reference is not None:
        imports.append(f"from {reference.build.__module__} import {name_of(reference.build, qualified=False)} as other")
        given.append("against=other")
    return test_source("check_program_on", name, repr(program), target, given, imports)


def test_source(
    function: str, name: str, what: str, target: Target, given: Sequence[str], imports: Sequence[str]
) -> str:
    """The source of a test that calls ``function``."""
    build = name_of(target.build, qualified=False)
    fields = [f"fields={dict(target.fields)!r}"] if target.fields else []
    arguments = ", ".join([what, build, f"world_size={target.world_size}", *fields, *given])
    return "\n".join(
        [
            *imports,
            *([""] if imports else []),
            f"from {getattr(target.build, '__module__', '?')} import {build}",
            f"from lightrft.conformance.reproduction import {function}",
            "",
            "",
            f"def test_{slug(name).replace('-', '_')}() -> None:",
            f"    {function}({arguments})",
        ]
    )
