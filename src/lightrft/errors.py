"""Every error that lightrft raises on purpose. Each text says what was wrong, what was seen and what to do next.

All of them are built-in errors by kind, so ``except ValueError`` and ``except ImportError`` work as a caller expects.
:data:`USER_ERRORS` is what the command line turns into one line and exit code 2, without a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration has values that cannot be used. One error lists all of them."""


class UnsupportedOperation(NotImplementedError):
    """The chosen backend or engine cannot do this: the text names it, the operation and the way out (law S2)."""


class MissingDependency(ImportError):
    """An optional library is not installed: the text holds the install line."""


class CheckpointError(OSError):
    """A checkpoint cannot be written or read: the text names the path and the reason."""


class EngineError(RuntimeError):
    """An inference engine was used wrongly or failed: the text names the request."""


class RankError(RuntimeError):
    """Another rank did not come, went away or failed: the text says which, as far as that can be known."""


class TaskError(ValueError):
    """A task file, a reward function or a run directory is not usable: the text names the culprit."""


USER_ERRORS: tuple[type[Exception], ...] = (
    ConfigError,
    UnsupportedOperation,
    MissingDependency,
    CheckpointError,
    EngineError,
    RankError,
    TaskError,
)


def unsupported(backend: str, operation: str, instead: str) -> UnsupportedOperation:
    """The error of law S2, its parts always in the same order."""
    return UnsupportedOperation(f"backend {backend!r} cannot do {operation}. Instead: {instead}")


def missing(library: str, extra: str, needed_for: str) -> MissingDependency:
    """The error for an optional ``library`` that the extra ``extra`` installs."""
    return MissingDependency(
        f"{needed_for} needs the package {library!r}, which is not installed. "
        f"Install it with: pip install 'lightrft[{extra}]'",
        name=library,
    )


def not_known(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is none of those there are, with the nearest of them."""
    from difflib import get_close_matches  # for errors alone

    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{what}={name!r} is not known.{hint} Known are {', '.join(names)}.")


def listed(problems: Iterable[str]) -> str:
    """Several problems as the indented lines of one message."""
    return "".join(f"\n  - {problem}" for problem in problems)
