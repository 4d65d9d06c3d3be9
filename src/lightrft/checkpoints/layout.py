"""How checkpoints lie on a disk: commit, ``latest``, rotation, finding a whole one. Plain Python.

::

    <save_dir>/latest                    the tag that a load without one takes
    <save_dir>/<tag>/manifest.json       written last: without it the directory is not a checkpoint
    <save_dir>/<tag>/...                 the files that the manifest lists with size and SHA-256
    <save_dir>/.tmp-<tag>-<pid>-<random> a save in progress, or what a dead one left
    <save_dir>/.old-<tag>-<pid>-<random> the checkpoint that a save of the same tag is about to replace, only where the
                                         file system cannot swap two directories in one step
    <save_dir>/.lock                     locked by the run that saves here, as long as it lives

A checkpoint is written to the hidden directory and renamed into place: it is there whole or not at all (law K4).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from attrs import frozen

from lightrft.checkpoints.manifest import (
    LATEST,
    FileEntry,
    Manifest,
    checked_tag,
    damage,
    flush,
    flushed_entries,
    read_manifest,
    tag_problem,
    versions,
    write_manifest,
)
from lightrft.errors import CheckpointError, listed

logger = logging.getLogger(__name__)

__all__ = [
    "FileEntry",
    "Found",
    "Manifest",
    "checked_tag",
    "damage",
    "find_checkpoint",
    "keep_others_out",
    "let_others_in",
    "list_checkpoints",
    "read_manifest",
    "remove",
    "remove_debris",
    "rotate",
    "write_checkpoint",
]

GIGABYTE = 10**9
UNFINISHED = _IN_PROGRESS, _REPLACED = ".tmp-", ".old-"
"""How the names of hidden directories begin: a save's own, and that of what it is about to replace."""
_LOCK = ".lock"


@frozen
class Found:
    """A checkpoint with a readable manifest. Whether its files are whole, :func:`damage` says."""

    path: Path
    manifest: Manifest


# --- writing


def write_checkpoint(
    save_dir: str | Path,
    tag: str,
    write: Callable[[Path], Mapping[str, FileEntry] | None],
    *,
    backend: str,
    world_size: int,
    step: int,
    max_num: int = 3,
    max_mem: float = 1000,
    save_latest: bool = True,
    extra: Mapping[str, object] | None = None,
) -> Path:
    """Commits what ``write`` puts into the empty directory that it is given as ``<save_dir>/<tag>``; returns that path.

    Only then ``latest`` is replaced (if ``save_latest``) and older checkpoints are removed (see :func:`rotate`). An
    error in ``write`` leaves every earlier checkpoint and ``latest`` as they were (FC09, FC26) and goes through, an
    ``OSError`` as ``CheckpointError``. What it returns are entries of files, by path inside the directory, that it made
    of the bytes as it wrote them: only the others are read again. ``extra`` is kept in the manifest: JSON values only.

    Raises ``CheckpointError`` for a tag that is no plain name and for what the file system refuses.
    """
    root, target = Path(save_dir), Path(save_dir) / checked_tag(tag)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(
            f"cannot save checkpoint {target}: a file or link has that name. Remove it or choose a tag."
        )
    with _named_errors(f"cannot write checkpoint {target}"):
        root.mkdir(parents=True, exist_ok=True)
        remove_debris(root)
        with _work_directory(root, tag) as work:
            recorded = write(work)
            manifest = Manifest(
                tag=tag,
                backend=backend,
                world_size=world_size,
                step=step,
                committed_at=1 + max((found.manifest.committed_at for found in list_checkpoints(root)), default=0),
                saved_on=datetime.now(UTC).isoformat(timespec="seconds"),
                files=flushed_entries(work, recorded),
                versions=versions(),
                extra=dict(extra or {}),
            )
            write_manifest(work, manifest)
            _commit(work, target)
    if save_latest:
        with _named_errors(f"checkpoint {target} is saved, but {root / LATEST} cannot be replaced"):
            _replace_latest(root, tag)
    rotate(root, tag, max_num=max_num, max_mem=max_mem)
    return target


def rotate(save_dir: Path, newest: str, *, max_num: int, max_mem: float) -> None:
    """Removes old checkpoints: law K5.

    Kept are the ``max_num`` most recently committed, of these as many as fit into ``max_mem`` (GB of 10**9 bytes), and
    in any case ``newest`` and the one that ``latest`` names. ``max_num <= 0`` keeps all, ``max_mem <= 0`` sets no bound
    of bytes. Directories that hold no manifest of ours for their own name are never touched. What cannot be removed is
    logged: the save itself has succeeded.
    """
    if max_num <= 0:
        return
    by_age = list_checkpoints(save_dir)
    spared = {newest, _latest_tag(save_dir)}
    # Those that stay anyway are counted first: the others share what is left.
    room = max_mem * GIGABYTE if max_mem > 0 else float("inf")
    room -= sum(found.manifest.size for found in by_age if found.manifest.tag in spared)
    for position, found in enumerate(by_age):
        if found.manifest.tag in spared:
            continue
        room -= found.manifest.size
        if position >= max_num or room < 0:
            try:
                remove(found.path)
            except OSError as error:
                logger.warning("old checkpoint %s cannot be removed: %s", found.path, error)


def remove_debris(save_dir: Path) -> None:
    """Removes what dead saves left. A live save holds a lock on its directory, which its death releases."""
    for path in _hidden(save_dir, _IN_PROGRESS):
        with suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)
    for path in _hidden(save_dir, _REPLACED):
        target = save_dir / _tag_of_hidden(path)
        with suppress(OSError):
            if target.exists():
                remove(path)
            else:
                path.rename(target)


@contextmanager
def _named_errors(what: str) -> Iterator[None]:
    """Turns what the file system says into a ``CheckpointError``."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        hint = " Free some space, or lower max_num or max_mem." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(f"{what}: {error}.{hint}") from error


@contextmanager
def _work_directory(root: Path, tag: str) -> Iterator[Path]:
    """A locked hidden directory that is gone afterwards, unless it was renamed."""
    work = root / f"{_IN_PROGRESS}{tag}-{os.getpid()}-{secrets.token_hex(4)}"
    work.mkdir()
    with _locked(work):
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a directory that a save uses; ``BlockingIOError`` if another holds it."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _commit(work: Path, target: Path) -> None:
    """Puts ``work`` in the place of ``target``: there is no moment at which neither of the two can be found."""
    _set_aside_unless_ours(target)
    replaced = work.with_name(_REPLACED + work.name.removeprefix(_IN_PROGRESS))
    if not target.exists():
        work.rename(target)
    elif not _swap(work, target):
        target.rename(replaced)
        work.rename(target)
    flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _swap(one: Path, other: Path) -> bool:
    """Exchanges two directories in one step. False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, rename_exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0)


def _set_aside_unless_ours(target: Path) -> None:
    """Keeps under another name what holds the tag without being a checkpoint of ours (FC27)."""
    if not target.exists():
        return
    try:
        read_manifest(target)
    except CheckpointError as error:
        if any(target.iterdir()):
            aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
            target.rename(aside)
            logger.warning("%s was in the way of a new checkpoint and is now %s: %s", target, aside, error)


def remove(path: Path) -> None:
    """Removes a checkpoint, such that a crash in between leaves debris, never half a checkpoint."""
    doomed = path.with_name(f"{_IN_PROGRESS}{path.name.lstrip('.')}-{os.getpid()}-{secrets.token_hex(4)}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _replace_latest(root: Path, tag: str) -> None:
    with _work_directory(root, LATEST) as work:
        (work / LATEST).write_text(tag, encoding="utf-8")
        flush(work / LATEST)
        (work / LATEST).replace(root / LATEST)
    flush(root)


# --- one run at a time


def keep_others_out(save_dir: str | Path, held: dict[Path, int], purpose: str = "save into") -> None:
    """Makes ``save_dir`` this run's own, before each save: two runs would rotate away each other's checkpoints.

    ``held`` has the open lock files of a run, by directory. Its locks are those of POSIX: they end with
    :func:`let_others_in` or with the process, however it dies, and neither refuse that process nor pass to its forks.
    Where the file system knows no locks, a warning says so and the run goes on. ``purpose`` is for the error.

    Raises ``CheckpointError`` that names the process which has the directory.
    """
    root = Path(save_dir).resolve()
    with _named_errors(f"cannot {purpose} {root}"):
        root.mkdir(parents=True, exist_ok=True)
        handle = _lock_file(root, held)
        try:
            # Also where it is held: any close of the file in this process, by another strategy or a copy, ends the lock.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning("%s cannot be locked (%s): let no other run save there", root, error.strerror)
                return
            holder = os.pread(handle, 200, 0).decode("utf-8", "replace").strip()
            os.close(held.pop(root))
            raise CheckpointError(
                f"cannot {purpose} {root}: another run saves there, {holder if holder.isprintable() and holder else 'unnamed'}."
                " Wait until it ends, stop it, or choose another directory."
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def let_others_in(held: dict[Path, int]) -> None:
    """Gives up every directory in ``held``. The lock files stay: one that is removed can be locked twice."""
    while held:
        os.close(held.popitem()[1])


def _lock_file(root: Path, held: dict[Path, int]) -> int:
    """The open lock file of ``root``: another one if somebody has replaced it."""
    path = root / _LOCK
    if root in held:
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held[root]), path.lstat()):
                return held[root]
        os.close(held.pop(root))
    held[root] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    return held[root]


# --- reading


def find_checkpoint(load_dir: str | Path, tag: str | None = None, *, verify: bool = True) -> Path:
    """The directory of checkpoint ``tag``, or without a tag of the one in ``latest``: law K6.

    Where ``latest`` is missing or names one that is not whole, it is the newest whole one, with a warning. ``verify``
    reads every file and compares checksums; without it only sizes are compared.

    Raises ``CheckpointError`` with path and reason if there is none, or the wanted one is missing, damaged or not ours.
    """
    root = Path(load_dir)
    if not root.is_dir():
        raise CheckpointError(f"no checkpoints in {root}: there is no such directory. Check the path.")
    wanted = tag if tag is not None else _latest_tag(root, refuse=True)
    if wanted is not None:
        path = _place(root, checked_tag(wanted))
        problems = damage(path, verify=verify)
        if not problems:
            return path
        if tag is not None:
            raise CheckpointError(f"cannot load checkpoint {path}:{listed(problems)}\n{_others(root, tag)}")
        logger.warning("the latest checkpoint %s is not whole, trying older ones:%s", path, listed(problems))
    rejected: list[str] = []
    for found in list_checkpoints(root):
        problems = damage(found.path, verify=verify)
        if not problems:
            logger.warning("loading %s, the newest whole checkpoint in %s", found.path, root)
            return found.path
        rejected += [f"{found.path}: {problem}" for problem in problems]
    raise CheckpointError(f"no whole checkpoint in {root}.{listed(rejected)}" + ("" if rejected else _foreign(root)))


def list_checkpoints(save_dir: str | Path) -> tuple[Found, ...]:
    """The checkpoints of ``save_dir`` that have a readable manifest for their own name, the last committed first.

    A copy under another name is its owner's: it can be loaded by that name, but is neither listed nor rotated.
    """
    root, found = Path(save_dir), []
    for path in root.iterdir() if root.is_dir() else ():
        if not path.is_dir() or path.is_symlink() or path.name.startswith(_IN_PROGRESS):
            continue
        with suppress(CheckpointError):
            manifest = read_manifest(path)
            if path == _place(root, manifest.tag):
                found.append(Found(path, manifest))
    return tuple(sorted(found, key=_commit_order, reverse=True))


def _commit_order(found: Found) -> int:
    return found.manifest.committed_at


def _place(root: Path, tag: str) -> Path:
    """Where checkpoint ``tag`` is: in between the two renames of a save that died, under its hidden name."""
    path = root / tag
    if not path.exists():
        for hidden in _hidden(root, _REPLACED):
            if _tag_of_hidden(hidden) == tag:
                return hidden
    return path


def _hidden(root: Path, prefix: str) -> list[Path]:
    """The hidden directories that saves made: nobody else's, even if the prefix is the same."""
    ours = re.compile(re.escape(prefix) + r".+-\d+-[0-9a-f]{8}", re.DOTALL)
    return [path for path in root.iterdir() if ours.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _tag_of_hidden(path: Path) -> str:
    return path.name.removeprefix(_REPLACED).rsplit("-", 2)[0]


def _latest_tag(root: Path, refuse: bool = False) -> str | None:
    """What ``latest`` holds; None if it is missing, empty or no tag. With ``refuse`` the last is an error (FC31)."""
    try:
        text = (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    if text and tag_problem(text) and refuse:
        raise CheckpointError(f"{root / LATEST} holds {text!r}, which {tag_problem(text)}. Correct it or name a tag.")
    return None if tag_problem(text) else text


def _others(root: Path, tag: str) -> str:
    names = ", ".join(found.path.name for found in list_checkpoints(root) if found.path.name != tag)
    return f"Others in {root}: {names}." if names else f"There is no other checkpoint in {root}."


def _foreign(root: Path) -> str:
    names = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))[:10]
    return f" It holds: {', '.join(names)}." if names else " It is empty."
