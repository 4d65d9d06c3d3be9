"""What a check of a trainer finds."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal, TypeAlias

from attrs import frozen

Kind: TypeAlias = Literal[
    "wrong arguments",
    "unknown name",
    "optional not checked",
    "wrong type of a result",
    "never called",
    "read-only",
    "on some ranks only",
    "result dropped",
    "not annotated",
    "other",
]


@frozen
class Finding:
    """One thing to look at. ``line`` and ``column`` count from 1; ``message`` is mypy's own where ``code`` is."""

    path: Path
    line: int
    column: int
    kind: Kind
    code: str
    message: str
    suggestion: str

    @property
    def fails(self) -> bool:
        """Whether a check with this finding fails: one that says what could not be checked does not."""
        return self.kind != "not annotated"

    def __str__(self) -> str:
        severity = "error" if self.fails else "note"
        where = f"{self.path}:{self.line}:{self.column}"
        return f"{where}: {severity}: {self.message} [{self.code}]\n    {self.suggestion}"


@frozen
class CheckReport:
    """What a check found. ``others``: errors of mypy's that have nothing to do with lightrft."""

    files: int
    findings: tuple[Finding, ...]
    others: int

    @property
    def exit_code(self) -> int:
        """0: nothing that fails; 1: something does."""
        return int(any(finding.fails for finding in self.findings))

    def __str__(self) -> str:
        failing = sum(finding.fails for finding in self.findings)
        notes = len(self.findings) - failing
        summary = f"{counted(failing, 'finding')} in {counted(self.files, 'file')}"
        summary += f", {counted(notes, 'note')}" if notes else ""
        lines = [*map(str, self.findings), summary]
        if self.others:
            are = "is" if self.others == 1 else "are"
            lines.append(
                f"{counted(self.others, 'other mypy error')} {are} not about lightrft: run mypy itself to see."
            )
        return "\n".join(lines)


@frozen
class Source:
    """A file that is checked."""

    path: Path
    tree: ast.Module
    ignored: frozenset[int]
    """The lines that ask for no findings."""


def finding_at(source: Source, node: ast.expr | ast.arg, kind: Kind, code: str, message: str, todo: str) -> Finding:
    """A finding of ours at a node."""
    return Finding(source.path, node.lineno, node.col_offset + 1, kind, code, message, todo)


def counted(number: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
