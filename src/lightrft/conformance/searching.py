"""Looks for a program that fails, and makes it smaller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, Protocol, TypeVar, cast

from attrs import NOTHING, evolve, fields, frozen

from lightrft.conformance.law import SHRINK_S, SearchEnded
from lightrft.conformance.oracle import lawful
from lightrft.conformance.pool import RankFailure
from lightrft.conformance.program import Operation, Program, Setup
from lightrft.conformance.running import Differs

R = TypeVar("R")


class Check(Protocol):
    """Runs a program, and raises where something came out that must not."""

    def __call__(self, program: Program, /) -> None: ...


@frozen(eq=False)
class Failed:
    """The smallest program found that fails, and what it raises."""

    program: Program
    error: Exception

    def raise_it(self, title: str) -> NoReturn:
        """With the program in a note."""
        self.error.add_note(f"\n{title}; the smallest program found:\n{self.program!r}")
        raise self.error from None


def search(check: Check, begin: Callable[[Check], None], examples: int) -> Failed | None:
    """``begin`` calls the check that it is given on one program after another; the smallest that fails, if one does.

    It ends after so many programs that differ, for Hypothesis repeats itself, and with the first failure. Programs are
    made smaller here and not by Hypothesis: as data they are soon small, and ``SHRINK_S`` is the limit. Where a rank died
    or hung nothing is tried again.
    """
    found: list[Failed] = []
    known: set[str] = set()

    def noting(program: Program) -> None:
        if repr(program) in known:
            return
        if len(known) == examples:
            raise SearchEnded
        known.add(repr(program))
        try:
            check(program)
        except Exception as error:
            found.append(Failed(failed_by(error, program), error))
            raise SearchEnded from error

    with suppress(SearchEnded):
        begin(noting)
    if not found:
        return None
    (first,) = found
    return first if isinstance(first.error, RankFailure) else Failed(*shrunk(check, first.program, first.error))


def failed_by(error: Exception, program: Program) -> Program:
    """What of a program was run when something differed."""
    return error.program if isinstance(error, Differs) else program


def shrunk(check: Check, program: Program, error: Exception) -> tuple[Program, Exception]:
    """A smaller program that fails in the same way, as long as one is found."""
    ends, tried = time.monotonic() + SHRINK_S, {repr(program)}
    candidates = smaller(program)
    while time.monotonic() < ends and (candidate := next(candidates, None)) is not None:
        if repr(candidate) in tried:
            continue
        tried.add(repr(candidate))
        try:
            check(candidate)
        except Exception as other:
            if isinstance(other, RankFailure):
                break  # another fault, and one that takes its time
            if type(other) is type(error):
                program, error = failed_by(other, candidate), other
                candidates = smaller(program)
    return program, error


def smaller(program: Program) -> Iterator[Program]:
    """Less of everything, one thing at a time: operations, then what they and the setup have beside their defaults."""
    setup, operations = program.setup, program.operations
    for place in reversed(range(len(operations))):
        yield lawful(setup, (*operations[:place], *operations[place + 1 :]))
    for name, value in defaults(setup):
        if name != "lanes":  # that is the ranks' business
            yield lawful(changed(setup, name, value), operations)
    for place, operation in enumerate(operations):
        for name, value in defaults(operation):
            simple = changed(operation, name, value)
            yield lawful(setup, (*operations[:place], simple, *operations[place + 1 :]))


def changed(record: R, name: str, value: object) -> R:
    """With one field changed."""
    made: R = evolve(cast("Any", record), **{name: value})
    return made


def defaults(record: Setup | Operation) -> list[tuple[str, object]]:
    """The fields that have another value than their default, and that default."""
    known = [(each.name, each.default) for each in fields(type(record)) if each.default is not NOTHING]
    return [(name, value) for name, value in known if getattr(record, name) != value]
