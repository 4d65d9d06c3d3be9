"""``traced``: every operation as an event of a trace that Perfetto shows, and a table of where the time went.

Open the file at https://ui.perfetto.dev or chrome://tracing. Times are the host's: an operation that only queues work on
an accelerator is as short as its queueing, and the wait shows where the host next needs the result.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from attrs import define, field, frozen
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightrft.strategy.record import StrategyRecord, bind
from lightrft.wrappers.operations import OPERATIONS, wrap

logger = logging.getLogger(__name__)

UNTRACED = frozenset({"is_rank_0", "get_rank", "unwrap_model", "init_model_context"})
"""Answers that take no time, and a context whose body is the trainer's own work."""
OUTSIDE = "(outside lightrft)"
NUMBER_BYTES = 8


@define
class OperationTime:
    """What one operation took."""

    calls: int = 0
    seconds: float = 0.0
    bytes_moved: int | None = None
    """Size of this rank's data, None for operations that are not collectives of data."""

    def add(self, seconds: float, bytes_moved: int | None) -> None:
        """Counts one more call."""
        self.calls += 1
        self.seconds += seconds
        if bytes_moved is not None:
            self.bytes_moved = (self.bytes_moved or 0) + bytes_moved


@frozen
class TimeSpent:
    """Where the time of a rank went; of several ranks, the sum."""

    wall_seconds: float
    operations: Mapping[str, OperationTime]


@define(eq=False)
class Recording:
    """An open trace: made by ``traced``, first parameter of the functions that add to it."""

    path: Path
    rank: int
    file: TextIO = field(repr=False)
    epoch_ns: int = field(factory=time.time_ns)
    """With ``clock_ns``: events are on the machine's common clock, yet no correction of it makes one shorter."""
    clock_ns: int = field(factory=time.perf_counter_ns)
    operations: dict[str, OperationTime] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock, repr=False)


def traced(strategy: StrategyRecord, path: str | Path) -> StrategyRecord:
    """``strategy`` that writes every operation to a trace at ``path`` and, at ``close``, logs :func:`time_table`.

    The file is in the JSON format of trace events: complete events in microseconds, pid = rank, tid = thread; collectives
    of data carry their ``bytes`` on this rank. An old file at ``path`` is replaced. With more than one rank each writes its
    own, ``trace.json`` becoming ``trace.rank0.json`` and so on; :func:`merge_traces` makes one picture of them. Each event
    is written as it ends, so the file is of use too when the run dies. Not traced: ``is_rank_0``, ``get_rank``,
    ``unwrap_model``, which take no time, and ``init_model_context``, whose body is the trainer's.
    """
    rank = strategy.get_rank()
    path = Path(path)
    if strategy.world_size > 1:
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    recording = Recording(path, rank, path.open("w", encoding="utf-8", buffering=1))
    recording.file.write("[\n")
    _write(recording, {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
    _write(recording, {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
    _write(recording, _instant(recording, "traced", recording.clock_ns))
    return wrap(strategy, [name for name in OPERATIONS if name not in UNTRACED], bind(_around, recording))


def size_of(data: object) -> int:
    """Bytes of what a collective takes: a number counts as 8."""
    if isinstance(data, Mapping):
        return sum(map(size_of, data.values()))
    return data.numel() * data.element_size() if isinstance(data, Tensor) else NUMBER_BYTES


@contextmanager
def _around(recording: Recording, operation: str, arguments: Mapping[str, object], /) -> Iterator[None]:
    bytes_moved = size_of(arguments["data"]) if "data" in arguments else None
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        end = time.perf_counter_ns()
        with recording.lock:
            if not recording.file.closed:
                _record(recording, operation, start, end, bytes_moved)
                if operation == "close":
                    _finish(recording, end)


def _microseconds(recording: Recording, clock_ns: int) -> float:
    """Since 1970, to the nanosecond as far as a float holds it."""
    return (recording.epoch_ns + clock_ns - recording.clock_ns) / 1e3


def _instant(recording: Recording, name: str, clock_ns: int) -> dict[str, object]:
    ts = _microseconds(recording, clock_ns)
    return {"name": name, "ph": "i", "s": "p", "ts": ts, "pid": recording.rank, "tid": threading.get_native_id()}


def _record(recording: Recording, operation: str, start: int, end: int, bytes_moved: int | None) -> None:
    recording.operations.setdefault(operation, OperationTime()).add((end - start) / 1e9, bytes_moved)
    event = {
        "name": operation,
        "cat": "lightrft",
        "ph": "X",
        "ts": _microseconds(recording, start),
        "dur": (end - start) / 1e3,
        "pid": recording.rank,
        "tid": threading.get_native_id(),
        "args": {} if bytes_moved is None else {"bytes": bytes_moved},
    }
    _write(recording, event)


def _write(recording: Recording, event: Mapping[str, object]) -> None:
    recording.file.write(json.dumps(event) + ",\n")


def _finish(recording: Recording, end: int) -> None:
    """Makes the file a whole JSON document and logs where the time went."""
    recording.file.write(json.dumps(_instant(recording, "close", end)) + "\n]\n")
    recording.file.close()
    spent = TimeSpent((end - recording.clock_ns) / 1e9, recording.operations)
    logger.info("rank %d, trace in %s:\n%s", recording.rank, recording.path, time_table(spent))


# ------------------------------------------------------------------------------------------------ reading it again


def _events(path: str | Path) -> Iterator[dict[str, object]]:
    """The events of a trace that ``traced`` wrote. A line that a dying run left half written is left out."""
    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            text = line.strip().removesuffix(",")
            if text not in ("[", "]", ""):
                try:
                    yield json.loads(text)
                except json.JSONDecodeError:
                    return


def merge_traces(paths: Iterable[str | Path], merged: str | Path) -> None:
    """Writes the traces of several ranks, finished or not, as one: every rank is a process of the picture.

    Ranks of one machine line up by its clock, those of several machines as well as their clocks agree.
    """
    lines = [json.dumps(event) for path in paths for event in _events(path)]
    Path(merged).write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def time_spent(path: str | Path) -> TimeSpent:
    """Where the time of a trace went, read from its file, be it merged or of a run that died."""
    operations: dict[str, OperationTime] = {}
    spans: dict[object, tuple[float, float]] = {}
    for event in _events(path):
        ts, dur = event.get("ts"), event.get("dur", 0.0)
        if not isinstance(ts, int | float) or not isinstance(dur, int | float):
            continue
        first, last = spans.get(event["pid"], (ts, ts))
        spans[event["pid"]] = (min(first, ts), max(last, ts + dur))
        if event["ph"] == "X":
            args = event["args"]
            moved = args.get("bytes") if isinstance(args, dict) else None
            operations.setdefault(str(event["name"]), OperationTime()).add(dur / 1e6, moved)
    return TimeSpent(sum(last - first for first, last in spans.values()) / 1e6, operations)


def time_table(spent: TimeSpent) -> str:
    """Where the time went, the longest first: calls, seconds, milliseconds a call, share of the wall time, bytes.

    ``(outside lightrft)`` is the time between operations. Operations of several threads at once add up, so that shares may
    come to more than 100 %.
    """
    outside = max(0.0, spent.wall_seconds - sum(each.seconds for each in spent.operations.values()))
    table = Table("operation")
    for heading in ("calls", "total s", "mean ms", "share", "bytes"):
        table.add_column(heading, justify="right")
    rows = [*spent.operations.items(), (OUTSIDE, OperationTime(seconds=outside))]
    for name, each in sorted(rows, key=lambda row: -row[1].seconds):
        table.add_row(
            name,
            f"{each.calls:,}" if each.calls else "",
            f"{each.seconds:.3f}",
            f"{1e3 * each.seconds / each.calls:.3f}" if each.calls else "",
            f"{each.seconds / spent.wall_seconds:.1%}" if spent.wall_seconds else "",
            "" if each.bytes_moved is None else f"{each.bytes_moved:,}",
        )
    table.add_section()
    table.add_row("wall", "", f"{spent.wall_seconds:.3f}", "", "", "")
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
