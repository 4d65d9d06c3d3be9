"""``manifest.json``: what a checkpoint is, and how to tell whether it is whole. Plain Python, no torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path, PurePosixPath

from attrs import asdict, field, frozen

from lightrft.checkpoints.checksums import FileEntry as FileEntry
from lightrft.checkpoints.checksums import checksums_match, file_entry
from lightrft.errors import CheckpointError

FORMAT = "lightrft-checkpoint"
FORMAT_VERSION = 2
"""2 has checksums of chunks. 1 is still read."""
MANIFEST = "manifest.json"
LATEST = "latest"
_LONGEST_TAG = 180
_SMALLEST_CHUNK = 2**16
_LIBRARIES = ("lightrft", "torch", "numpy", "safetensors", "transformers")


@frozen(kw_only=True)
class Manifest:
    """What ``manifest.json`` says about a checkpoint."""

    tag: str
    backend: str
    world_size: int
    step: int
    committed_at: int
    """Position among the commits to this directory. Neither clocks nor names order checkpoints (FC07, FC08, FC25)."""
    saved_on: str
    """Date and time in UTC, for people only."""
    files: Mapping[str, FileEntry]
    """By path inside the checkpoint, with ``/``."""
    versions: Mapping[str, str]
    extra: Mapping[str, object] = field(factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all listed files."""
        return sum(entry.size for entry in self.files.values())


def checked_tag(tag: str) -> str:
    """``tag`` if it can name a directory inside any ``save_dir``, else ``CheckpointError`` (laws K9, FC31)."""
    problem = tag_problem(tag)
    if problem:
        raise CheckpointError(
            f"checkpoint tag {tag!r} {problem}. Use a plain name such as 'step100': letters, digits, '-', '_', '.'."
        )
    return tag


def tag_problem(tag: object) -> str | None:
    if not isinstance(tag, str):
        return f"is of type {type(tag).__name__}, not a string"
    if not tag or tag.isspace() or tag != tag.strip():
        return "is empty or has spaces around it"
    if any(character in "/\\" for character in tag):
        return "has a path separator and could leave the directory"
    if tag.startswith("."):
        return "starts with a dot"
    if not tag.isprintable():
        return "has characters that cannot be printed"
    if len(tag.encode("utf-8", "surrogatepass")) > _LONGEST_TAG:
        return f"is longer than {_LONGEST_TAG} bytes"
    if tag == LATEST:
        return "is the name of the file that holds the latest tag"
    return None


def flushed_entries(directory: Path, recorded: Mapping[str, FileEntry] | None = None) -> dict[str, FileEntry]:
    """The entry of every file below ``directory``, after all of it is on the disk.

    ``recorded``: those that whoever wrote a file made of what it wrote. The others are made of what is there.
    """
    entries, known = {}, recorded or {}
    for path in sorted(directory.rglob("*")):
        flush(path)
        if not path.is_dir():
            name = path.relative_to(directory).as_posix()
            entry = known.get(name)
            entries[name] = entry if entry is not None and entry.size == path.stat().st_size else file_entry(path)
    return entries


def write_manifest(directory: Path, manifest: Manifest) -> None:
    body: dict[str, object] = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
    body["checksum"] = _digest(json.loads(json.dumps(body)))
    (directory / MANIFEST).write_text(json.dumps(body, indent=2), encoding="utf-8")
    flush(directory / MANIFEST)
    flush(directory)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[library] = metadata.version(library)
    return found


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the checkpoint directory ``path``; ``CheckpointError`` if it is missing, damaged or not ours."""
    file = Path(path) / MANIFEST
    try:
        body: object = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not the manifest of a lightrft checkpoint")
    if body.pop("checksum", None) != _digest(body):
        raise CheckpointError(f"{file} is damaged: its checksum does not match")
    if (version := body.pop("format_version", None)) not in range(1, FORMAT_VERSION + 1):
        raise CheckpointError(
            f"{file} has format version {version!r}, known are 1 to {FORMAT_VERSION}. Load it with a newer lightrft."
        )
    del body["format"]
    try:
        manifest = Manifest(**{**body, "files": {name: FileEntry(**entry) for name, entry in body["files"].items()}})
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a valid manifest: {error}") from error
    _check_manifest(file, manifest)
    return manifest


def damage(path: Path, *, verify: bool = True, advance: Callable[[int], None] = lambda size: None) -> tuple[str, ...]:
    """What is wrong with the checkpoint at ``path``: nothing, if it is whole. ``verify``: every byte is read.

    ``advance`` is told the size of each file once it was looked at.
    """
    if not path.is_dir():
        return (f"{path} does not exist",)
    try:
        files = read_manifest(path).files
    except CheckpointError as error:
        return (str(error),)
    problems: list[str] = []
    for name, entry in files.items():
        problems += _damage_of_file(path / name, entry, verify)
        advance(entry.size)
    return tuple(problems)


def _damage_of_file(file: Path, entry: FileEntry, verify: bool) -> list[str]:
    try:
        if file.is_symlink() or not file.is_file():
            return [f"{file} is missing"]
        if (size := file.stat().st_size) != entry.size:
            return [f"{file} has {size} bytes, not {entry.size}"]
    except OSError as error:
        return [f"{file} cannot be read: {error}"]
    match = checksums_match([(file, entry)])[0] if verify else True
    if isinstance(match, OSError):
        return [f"{file} cannot be read: {match}"]
    return [] if match else [f"{file} is damaged: its checksum does not match"]


def _check_manifest(file: Path, manifest: Manifest) -> None:
    """A manifest may come from anybody: nothing in it may lead out of the directory."""
    checked_tag(manifest.tag)
    if not all(isinstance(number, int) for number in (manifest.world_size, manifest.step, manifest.committed_at)):
        raise CheckpointError(f"{file} is not a valid manifest: world_size, step and committed_at must be integers")
    for name, entry in manifest.files.items():
        if not _is_valid(entry):
            raise CheckpointError(f"{file} is not a valid manifest: of {name!r} it says {entry}")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise CheckpointError(f"{file} lists {name!r}, which is outside of the checkpoint")


def _is_valid(entry: FileEntry) -> bool:
    """Chunks must not be so small that their number is a burden."""
    numbers = (entry.size, entry.chunk_size)
    if not isinstance(entry.sha256, str) or not all(isinstance(number, int) and number >= 0 for number in numbers):
        return False
    return entry.chunk_size == 0 or entry.chunk_size >= _SMALLEST_CHUNK


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
