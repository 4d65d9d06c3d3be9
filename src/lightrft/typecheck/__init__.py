"""What a type checker and a look at the source can tell of a trainer before it runs: ``lightrft check``.

Three parts, and each finding says by its ``code`` which one it comes from.

1. **Types** (mypy's own codes: ``arg-type``, ``attr-defined``, ...). mypy runs on the files, with settings of ours and
   none of the user's. *Whether an error is about lightrft* is not guessed from its text: where mypy finds anything, it
   runs a second time with every type of lightrft replaced by ``Any``. An error is about lightrft if it is then gone. So
   ``total: int = strategy.all_reduce(x)`` is reported and a name that is not defined is counted under ``others``, even
   among the arguments of an operation.
2. **Ranks** (``rank-only``). In an operation in which ranks meet, those that come wait for those that do not. No type
   shows that, so this is a pass over the syntax tree: see :mod:`lightrft.typecheck.by_syntax`.
3. **What could not be checked** (``unannotated``): a parameter ``strategy`` without a type. It does not fail a check.

A line with the comment ``# lightrft: ignore`` has no findings of parts 2 and 3; mypy's own ``# type: ignore`` is for
part 1. Where mypy's cache is empty a check takes as long as reading torch (10 to 20 s), then about a second.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from lightrft.errors import missing
from lightrft.typecheck.by_mypy import default_cache, errors_about_us, explained
from lightrft.typecheck.by_syntax import dropped_findings, rank_findings, unannotated_findings
from lightrft.typecheck.findings import CheckReport, Finding, Kind
from lightrft.typecheck.sources import files_of, read

__all__ = ["CheckReport", "Finding", "Kind", "check_files"]


def check_files(targets: Sequence[str | Path], *, cache_dir: Path | None = None) -> CheckReport:
    """Checks files, directories and packages that can be imported (nothing of them is run).

    ``cache_dir`` is mypy's, by default one of our own under the user's cache. Raises ``ConfigError`` for a target that
    is none of these, holds no Python or has a syntax error, and ``MissingDependency`` where mypy is not installed.
    """
    if importlib.util.find_spec("mypy") is None:
        raise missing("mypy", "check", "lightrft check")
    sources = read([path for target in targets for path in files_of(target)])
    messages, others = errors_about_us(sources, default_cache() if cache_dir is None else cache_dir)
    findings = [explained(message) for message in messages]
    for source in sources:
        own = [*rank_findings(source), *dropped_findings(source), *unannotated_findings(source)]
        findings += [finding for finding in own if finding.line not in source.ignored]
    findings.sort(key=lambda finding: (str(finding.path), finding.line, finding.column))
    return CheckReport(len(sources), tuple(findings), others)
