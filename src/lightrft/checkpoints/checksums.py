"""Checksums of large files, by several threads at once. Plain Python, no torch.

A file of up to :data:`CHUNK` bytes has its own SHA-256, a larger one the SHA-256 of the SHA-256s (as bytes, in order) of
its chunks: these do not wait for each other, and a writer that has just written a chunk knows its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from attrs import frozen

CHUNK = 8 * 2**20
_READ_AT_ONCE = 2**20  # stays in a core's cache between being read and being hashed
_MOST_THREADS = 4


@frozen
class FileEntry:
    """A file of a checkpoint: its size in bytes and a checksum of its content in hexadecimal."""

    size: int
    sha256: str
    chunk_size: int = 0
    """0: ``sha256`` is that of the content. Else that of the SHA-256s of its chunks of so many bytes."""


class Fill(Protocol):
    """Puts the next bytes of a file into all of ``chunk``."""

    def __call__(self, chunk: memoryview, /) -> None: ...


def write_chunks(path: Path, size: int, fill: Fill) -> FileEntry:
    """Writes a file of ``size`` bytes, chunk after chunk as ``fill`` gives them; returns its entry.

    This thread fills and writes, others hash: a few chunks of memory, whatever ``size`` is. Raises what ``fill`` raises,
    and the ``OSError`` of the file system.
    """
    pieces = _pieces(path, size, CHUNK)
    digests = [b""] * len(pieces)
    threads = min(_threads(), len(pieces))
    idle: SimpleQueue[memoryview] = SimpleQueue()
    filled: SimpleQueue[tuple[int, memoryview] | None] = SimpleQueue()
    for _ in range(threads + 1):
        idle.put(memoryview(bytearray(min(CHUNK, size))))

    def hash_chunks() -> None:
        for index, buffer in iter(filled.get, None):
            digests[index] = hashlib.sha256(buffer[: pieces[index].length]).digest()
            idle.put(buffer)

    # One thread writes: two would wait for the lock of the file, and burn a core with it.
    with path.open("wb", buffering=0) as file, _running(threads, hash_chunks, lambda: filled.put(None)):
        for index, piece in enumerate(pieces):
            buffer = idle.get()
            chunk = buffer[: piece.length]
            fill(chunk)
            filled.put((index, buffer))
            while chunk:
                chunk = chunk[file.write(chunk) :]
    return _entry(size, digests)


def file_entry(path: Path) -> FileEntry:
    """The entry of a file that is there."""
    size = path.stat().st_size
    digests = _digests(_pieces(path, size, CHUNK))
    return _entry(size, [_digest_or_raise(each) for each in digests])


def checksums_match(files: Sequence[tuple[Path, FileEntry]]) -> list[bool | OSError]:
    """Whether each file has the content that its entry says; the error where it cannot be read."""
    pieces = [_pieces(path, entry.size, entry.chunk_size) for path, entry in files]
    digests = iter(_digests([piece for each in pieces for piece in each]))
    found: list[bool | OSError] = []
    for (_, entry), own in zip(files, pieces, strict=True):
        results = [next(digests) for _ in own]
        errors = [result for result in results if isinstance(result, OSError)]
        whole = _combined([result for result in results if isinstance(result, bytes)], entry.chunk_size)
        found.append(errors[0] if errors else whole == entry.sha256)
    return found


# --- pieces of files


@frozen
class _Piece:
    path: Path
    offset: int
    length: int


def _pieces(path: Path, size: int, chunk_size: int) -> list[_Piece]:
    """At least one, of no bytes if there are none."""
    step = chunk_size if 0 < chunk_size < size else max(size, 1)
    return [_Piece(path, offset, min(step, size - offset)) for offset in range(0, max(size, 1), step)]


def _entry(size: int, digests: Sequence[bytes]) -> FileEntry:
    chunk_size = CHUNK if len(digests) > 1 else 0
    return FileEntry(size, _combined(digests, chunk_size), chunk_size)


def _combined(digests: Sequence[bytes], chunk_size: int) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest() if chunk_size else b"".join(digests).hex()


def _digest_or_raise(result: bytes | OSError) -> bytes:
    if isinstance(result, OSError):
        raise result
    return result


def _digests(pieces: Sequence[_Piece]) -> list[bytes | OSError]:
    """Of each piece its SHA-256, or why it cannot be read."""
    results: list[bytes | OSError] = [b""] * len(pieces)
    waiting = iter(range(len(pieces)))  # a range's iterator gives each number to one thread

    def work() -> None:
        buffer = memoryview(bytearray(_READ_AT_ONCE))
        for index in waiting:
            try:
                results[index] = _sha256(pieces[index], buffer)
            except OSError as error:
                results[index] = error

    with _running(min(_threads(), len(pieces)), work):
        pass
    return results


def _sha256(piece: _Piece, buffer: memoryview) -> bytes:
    digest = hashlib.sha256()
    with piece.path.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        left = piece.length
        while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


# --- threads


def _threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)


@contextmanager
def _running(count: int, work: Callable[[], None], stop: Callable[[], None] | None = None) -> Iterator[None]:
    """``work`` runs in ``count`` threads, each of which ``stop`` ends.

    No executor: that takes no work once the interpreter begins to end, when a save may still be under way.
    """
    threads = [Thread(target=work, name="checkpoint file") for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        if stop is not None:
            for _ in threads:
                stop()
        for thread in threads:
            thread.join()
