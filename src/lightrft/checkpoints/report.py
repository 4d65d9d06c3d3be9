"""What lies in a directory of checkpoints: whole or damaged, and what a person may want removed. Plain Python."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from attrs import evolve, frozen

from lightrft.checkpoints.layout import UNFINISHED, keep_others_out, let_others_in, list_checkpoints
from lightrft.checkpoints.layout import remove as remove_checkpoint
from lightrft.checkpoints.manifest import FORMAT, LATEST, MANIFEST, Manifest, damage, read_manifest
from lightrft.errors import CheckpointError


@frozen
class Entry:
    """A checkpoint of ours, in whatever state."""

    path: Path
    manifest: Manifest | None
    """None if it cannot be read."""
    problems: tuple[str, ...]
    """Why it is damaged; empty if it is whole."""
    is_latest: bool
    is_copy: bool
    """It lies under another name than it was saved by: it is loaded by this name, and never rotated."""


@frozen
class Report:
    """What is in a directory, the last committed checkpoint first."""

    directory: Path
    entries: tuple[Entry, ...]
    problem: str | None
    """What is wrong with ``latest``."""
    unfinished: tuple[str, ...]
    """Saves in progress, or what dead ones left: the next save removes that."""
    foreign: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing in it is damaged."""
        return self.problem is None and not any(entry.problems for entry in self.entries)


def checkpoints_in(directory: str | Path) -> Path:
    """``directory``, or where a run of ``lightrft train`` keeps its checkpoints; ``CheckpointError`` if there is none."""
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoints in {path}: there is no such directory. Check the path.")
    if not os.access(path, os.R_OK | os.X_OK):
        raise CheckpointError(f"no checkpoints in {path}: you have no permission to read it.")
    if _is_ours(path):
        raise CheckpointError(f"{path} is itself a checkpoint. Name the directory that it lies in: {path.parent}")
    inner = path / "checkpoints"
    return inner if inner.is_dir() and not list_checkpoints(path) else path


def examine(
    directory: str | Path, *, verify: bool = False, advance: Callable[[int], None] = lambda size: None
) -> Report:
    """Looks at every checkpoint: sizes only, or with ``verify`` every byte.

    ``advance`` is told how many bytes were looked at. Raises ``CheckpointError`` if there is no checkpoint at all.
    """
    root = checkpoints_in(directory)
    known = {found.path: found for found in list_checkpoints(root)}
    rest = [path for path in sorted(root.iterdir()) if path not in known and path.name != LATEST]
    latest = _latest(root)
    places = [*known, *(path for path in rest if _is_ours(path) and not path.name.startswith(UNFINISHED))]
    entries = []
    for path in places:
        found = known.get(path)
        manifest = _readable(path) if found is None else found.manifest
        problems = damage(path, verify=verify, advance=advance)
        name = path.name if found is None else found.manifest.tag
        entries.append(Entry(path, manifest, problems, name == latest, found is None and manifest is not None))
    unfinished = tuple(path.name for path in rest if path not in places and path.name.startswith(UNFINISHED))
    foreign = tuple(path.name for path in rest if path not in places and not path.name.startswith("."))
    if not entries and not unfinished:
        holds = f"It holds: {', '.join(foreign[:10])}." if foreign else "It is empty."
        raise CheckpointError(f"no checkpoints in {root}. {holds}")
    lost = latest is not None and not any(entry.is_latest for entry in entries)
    problem = f"{root / LATEST} names {latest!r}, and there is no such checkpoint" if lost else None
    return Report(root, tuple(entries), problem, unfinished, foreign)


def bytes_in(directory: str | Path) -> int:
    """How much :func:`examine` reads with ``verify``."""
    root = checkpoints_in(directory)
    manifests = [_readable(path) for path in root.iterdir() if _is_ours(path)]
    return sum(manifest.size for manifest in manifests if manifest is not None)


def superfluous(report: Report, keep: int) -> tuple[Entry, ...]:
    """The checkpoints that are older than the ``keep`` most recently committed whole ones, and not ``latest``.

    A damaged one does not count as kept: the whole ones behind it may be all that is left. One whose age is not known,
    and a copy under another name, stays. ``CheckpointError`` if ``keep`` is below 1.
    """
    if keep < 1:
        raise CheckpointError(f"--prune {keep} would keep nothing: at least 1 checkpoint is kept.")
    kept, old = 0, []
    for entry in report.entries:
        if entry.manifest is None or entry.is_copy:
            continue
        if kept >= keep and not entry.is_latest:
            old.append(entry)
        kept += not entry.problems
    return tuple(old)


def remove(report: Report, entry: Entry) -> Report:
    """Removes a checkpoint at once: a crash in between leaves debris, never half a checkpoint. What is then left."""
    try:
        remove_checkpoint(entry.path)
    except OSError as error:
        raise CheckpointError(f"{entry.path} cannot be removed: {error}") from error
    return evolve(report, entries=tuple(other for other in report.entries if other is not entry))


@contextmanager
def no_run_saves_into(directory: str | Path) -> Iterator[None]:
    """No run can save into ``directory`` meanwhile; ``CheckpointError`` names the one that does already."""
    held: dict[Path, int] = {}
    root = checkpoints_in(directory)
    try:
        keep_others_out(root, held, "prune")
        yield
    finally:
        let_others_in(held)


def _is_ours(path: Path) -> bool:
    """Whether a directory holds a manifest that is ours, or that was once one."""
    file = path / MANIFEST
    if path.is_symlink() or not file.is_file():
        return False
    try:
        body: object = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(body, Mapping) and body.get("format") == FORMAT


def _readable(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def _latest(root: Path) -> str | None:
    try:
        return (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
