"""The files that are checked, and their syntax trees."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from lightrft.errors import ConfigError, listed
from lightrft.typecheck.findings import Source

SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})
IGNORE = re.compile(r"#\s*lightrft:\s*ignore\b")


def files_of(target: str | Path) -> list[Path]:
    """The Python files of a file, a directory or a package."""
    path = Path(target)
    if not path.exists():
        path = package_path(str(target))
    if path.is_file():
        return [path]
    inside = (file.relative_to(path) for file in path.rglob("*.py"))
    found = [path / file for file in inside if not any(part in SKIPPED or part[0] == "." for part in file.parts)]
    if not found:
        raise ConfigError(f"{str(path)!r} holds no Python files. Name a file, a directory or a package that does.")
    return sorted(found)


def package_path(name: str) -> Path:
    """Where a package or module lies; it is looked up and not imported."""
    places: list[str] | None = None
    found = ""
    for depth, part in enumerate(name.split("."), 1):
        spec = PathFinder.find_spec(".".join(name.split(".")[:depth]), places) if part.isidentifier() else None
        if spec is None:
            raise ConfigError(
                f"{name!r} is no file, no directory and no package that can be imported from here. "
                "Check the spelling, or install the package into this environment."
            )
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        found = places[0] if places else spec.origin or ""
    return Path(found)


def read(paths: Iterable[Path]) -> list[Source]:
    """Each file once. Raises one ``ConfigError`` with every syntax error."""
    sources, problems = [], []
    for path in dict.fromkeys(paths):
        try:
            content = path.read_bytes()
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(content, filename=str(path))
        except SyntaxError as error:
            problems.append(f"{path}:{error.lineno}:{error.offset}: {error.msg}")
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
        else:
            lines = content.decode(errors="replace").splitlines()
            ignored = frozenset(number for number, line in enumerate(lines, 1) if IGNORE.search(line))
            sources.append(Source(path, tree, ignored))
    if problems:
        raise ConfigError(f"Python cannot read:{listed(problems)}\nMend these first.")
    return sources
