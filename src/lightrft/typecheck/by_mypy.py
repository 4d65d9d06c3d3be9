"""mypy's errors that are about lightrft, each with what to do next."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path

from attrs import frozen

import lightrft
from lightrft.engines import protocol as engines
from lightrft.errors import ConfigError, listed
from lightrft.strategy import config, protocol
from lightrft.typecheck.findings import Finding, Kind, Source

SETTINGS = """[mypy]
check_untyped_defs = True
enable_error_code = truthy-bool
follow_imports = silent
ignore_missing_imports = True
local_partial_types = True
show_column_numbers = True
strict_equality = True

# Large, and what a strategy takes of them are torch's types.
[mypy-deepspeed.*,sglang.*,transformers.*,trl.*,vllm.*]
follow_imports = skip

[mypy-lightrft.*]
"""
OURS = "ignore_missing_imports = False\n"
ANY = "follow_imports = skip\n"


@frozen
class Message:
    """An error of mypy's."""

    path: Path
    line: int
    column: int
    code: str
    text: str
    hint: str

    @property
    def place(self) -> tuple[Path, int, int, str]:
        """What the two runs are compared by: the text may hold a type that is another one in each."""
        return self.path, self.line, self.column, self.code


def default_cache() -> Path:
    """Ours, so that no other settings of mypy's throw away what was read."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightrft" / "mypy"


def errors_about_us(sources: Sequence[Source], cache: Path) -> tuple[list[Message], int]:
    """mypy's errors that are gone where lightrft's types are ``Any``, and the number of the others."""
    about_us: list[Message] = []
    others = 0
    for paths in without_namesakes([source.path for source in sources]):
        errors = run_mypy(paths, SETTINGS + OURS, cache)
        stay = {error.place for error in run_mypy(paths, SETTINGS + ANY, cache)} if errors else set()
        about_us += [error for error in errors if error.place not in stay]
        others += sum(error.place in stay for error in errors)
    return about_us, others


def without_namesakes(paths: Iterable[Path]) -> list[list[Path]]:
    """The paths in as few lists as keep modules of one name apart: mypy takes no two of them in one run."""
    seen: Counter[str] = Counter()
    runs: list[list[Path]] = []
    for path in paths:
        name = module_name(path)
        if seen[name] == len(runs):
            runs.append([])
        runs[seen[name]].append(path)
        seen[name] += 1
    return runs


def module_name(path: Path) -> str:
    """As mypy sees it: the directories above count as long as they hold an ``__init__.py``."""
    parts = [] if path.stem == "__init__" else [path.stem]
    parent = path.resolve().parent
    while (parent / "__init__.py").exists():
        parts.insert(0, parent.name)
        parent = parent.parent
    return ".".join(parts)


def run_mypy(paths: Sequence[Path], settings: str, cache: Path) -> list[Message]:
    """mypy's errors in ``paths``, by a process of its own."""
    homes = [str(Path(lightrft.__file__).resolve().parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # mypy reads site-packages by itself and refuses to be pointed there.
    search = [
        home for home in dict.fromkeys(homes) if home and Path(home).name not in ("site-packages", "dist-packages")
    ]
    with tempfile.TemporaryDirectory(prefix="lightrft-check-") as directory:
        settings_file, names = Path(directory, "mypy.ini"), Path(directory, "files")
        settings_file.write_text(settings)
        names.write_text("\n".join(map(str, paths)))
        options = ["--config-file", str(settings_file), "--cache-dir", str(cache), "--output", "json"]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "mypy", *options, f"@{names}"],
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={**os.environ, "MYPYPATH": os.pathsep.join(search), "PYTHONIOENCODING": "utf-8"},
        )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode not in (0, 1):
        said = [f"{row['file']}:{row['line']}: {row['message']}" for row in rows] or [
            done.stderr.strip() or done.stdout
        ]
        raise ConfigError(f"mypy could not check these files:{listed(said)}\nMend that, or leave the file out.")
    given = {path.resolve(): path for path in paths}
    at = [given.get(Path(row["file"]).resolve(), Path(row["file"])) for row in rows]
    return [
        Message(path, row["line"], row["column"] + 1, row["code"] or "", row["message"], row["hint"] or "")
        for path, row in zip(at, rows, strict=True)
        if row["severity"] == "error"
    ]


VALUES = "data: a tensor, a number, or a mapping of these"
OVERLOADED: Mapping[str, str] = {
    "all_gather": VALUES,
    "all_reduce": f"{VALUES}; op: 'mean', 'sum', 'max' or 'min'",
    "broadcast": f"{VALUES}; src: int",
    "prepare": "each: a model, (model, optimizer), (model, optimizer, scheduler), (model, None) or None; is_rlhf: bool",
    "prepare_models_and_optimizers": "actor, critic or None, reward_models, initial_model, args, max_steps: int",
}
"""What those operations take that have more than one signature."""


def operations() -> dict[str, str]:
    """Each operation with the name of its callback Protocol."""
    members = ((name, getattr(protocol.Strategy, name)) for name in dir(protocol.Strategy) if name[0] != "_")
    types = {name: str(member.fget.__annotations__["return"]) for name, member in members}
    return {name: type_ for name, type_ in types.items() if "__call__" in vars(getattr(protocol, type_, object))}


def parameters_of(operation: str) -> str:
    """What an operation takes, in words or as it is declared."""
    if operation in OVERLOADED:
        return OVERLOADED[operation]
    _, *parameters = signature(getattr(protocol, operations()[operation]).__call__).parameters.values()
    return ", ".join(str(each).replace(f"{each.annotation!r}", f"{each.annotation}") for each in parameters)


def members_of(type_: str) -> Sequence[str]:
    """The public names of one of our types; none if it is not ours."""
    if type_ in ("lightrft", "Module"):
        return lightrft.__all__
    if type_ in ("StrategyRecord", "FakeStrategy"):
        type_ = "Strategy"
    home = next((module for module in (protocol, engines, config) if hasattr(module, type_)), None)
    return [name for name in dir(getattr(home, type_)) if name[0] != "_"] if home else []


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that was meant, if any is near: by its spelling, or because it holds the whole word."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    holds = [each for each in known if name in each.split("_") or f"_{name}" in each]
    return near[0] if near else min(holds, key=len, default=None)


def explained(error: Message) -> Finding:
    """mypy's error with its kind and what to do next."""
    kind, suggestion = diagnosis(error)
    return Finding(error.path, error.line, error.column, kind, error.code, error.text, suggestion)


def diagnosis(error: Message) -> tuple[Kind, str]:
    """The kind of an error that is about lightrft, and what to do next."""
    text = error.text
    by_type = {type_: name for name, type_ in operations().items()}
    operation = next((by_type[word] for word in re.findall(r'"(\w+)"', text) if word in by_type), None)
    if error.code == "union-attr" or is_optional(error):
        return "optional not checked", unchecked(text)
    if error.code == "import-not-found" or text.startswith("Module "):
        wanted = re.search(r'(?:named|attribute) "(?:\w+\.)*(\w+)"', text)
        return "unknown name", meant(wanted[1] if wanted else "", lightrft.__all__, "lightrft")
    if lacking := re.search(r'"(\w+)" has no attribute "(\w+)"', text):
        return "unknown name", meant(lacking[2], members_of(lacking[1]), lacking[1])
    if wrong := re.search(r'Unexpected keyword argument "(\w+)" for "(\w+)"', text):
        options = [*protocol.AdamWOptions.__annotations__] if operation == "create_optimizer" else []
        named = re.findall(r"(\w+):", parameters_of(operation)) if operation else members_of(wrong[2])
        return "unknown name", meant(wrong[1], [*options, *named], operation or wrong[2])
    if error.code in ("truthy-bool", "truthy-function", "comparison-overlap") and operation:
        return "never called", f"{operation} is a function: write {operation}()."
    if "read-only" in text:
        return "read-only", "A strategy does not change: make another one, from attrs.evolve(config, ...)."
    if operation:
        return "wrong arguments", f"{operation} takes ({parameters_of(operation)})."
    if (callee := re.search(r'(?:to|for|of) "(\w+)"', text)) and callee[1] in lightrft.__all__:
        return "wrong arguments", f"See help(lightrft.{callee[1]}): every field and its type."
    if error.code in ("arg-type", "assignment", "call-overload", "index", "list-item", "operator", "return-value"):
        return (
            "wrong type of a result",
            "What comes from lightrft has another type: convert it, or mend what awaits it.",
        )
    return "other", "It is gone where lightrft's types are not known: see help(lightrft.Strategy)."


def meant(name: str, known: Sequence[str], owner: str) -> str:
    """The nearest name, or all there are."""
    if near := nearest(name, known):
        return f"Did you mean {near!r}?"
    return f"{owner} has {', '.join(known)}." if 0 < len(known) < 20 else f"{owner} has nothing like it: see help()."


def is_optional(error: Message) -> bool:
    """Whether a value that may be None comes where it may not."""
    given = re.search(
        r'(?:incompatible type|expression has type|got|Value of type|operand is of type) "(?P<given>[^"]*)"'
        r'(?:.*(?:expected|variable has type) "(?P<wanted>[^"]*)")?',
        f"{error.text} {error.hint}",
    )
    if given is None:
        return error.code == "operator" and '"None"' in error.text
    wanted = given["wanted"] or ""
    return given["given"].endswith("| None") and not wanted.endswith("None")


def unchecked(text: str) -> str:
    """Where None comes from and what to do about it."""
    if "Engine" in text:
        return "There may be no engine (the fake has none). Check first: if engine is None: ..."
    if "tuple[float" in text:
        return "logprobs is None where Sampling(logprobs=False) asked for none. Check first: if logprobs is None: ..."
    if "float" in text:
        return "grad_norm is None between updates. Check first: if outcome.grad_norm is not None: ..."
    return "It may be None. Check first: if it is None: ..."
