"""``traced``: a trace that Perfetto opens, and a table of where the time went."""

from __future__ import annotations

import inspect
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightrft import Strategy, StrategyConfig
from lightrft.backends import local
from lightrft.strategy.record import StrategyRecord, compose, evolve
from lightrft.wrappers import checked, merge_traces, time_spent, time_table, traced
from lightrft.wrappers.operations import OPERATIONS
from lightrft.wrappers.traced import OUTSIDE, UNTRACED, OperationTime, TimeSpent, size_of

Event = dict[str, object]


def alone() -> StrategyRecord:
    return local.build(StrategyConfig.from_args({"bf16": False}))


def one_of_two(rank: int) -> StrategyRecord:
    return evolve(alone(), world_size=2, get_rank=lambda: rank)


def operations(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def name_of(strategy: Strategy) -> str:
    """What mypy and pyright check: that a wrapped strategy is a ``Strategy``."""
    return strategy.name


def test_a_trace_is_whole_after_close(tmp_path: Path) -> None:
    path = tmp_path / "made" / "trace.json"
    strategy = traced(alone(), path)
    assert name_of(strategy) == "local"
    model = nn.Linear(2, 1)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    model, optimizer = strategy.prepare((model, optimizer))
    strategy.backward(model(torch.ones(1, 2)).mean(), model, optimizer)
    strategy.all_reduce({"x": torch.zeros(3), "y": {"z": 1.0}}, "sum")
    strategy.close()
    strategy.close()
    events: list[Event] = json.loads(path.read_text())
    made = operations(events)
    assert [event["name"] for event in made] == ["create_optimizer", "prepare", "backward", "all_reduce", "close"]
    assert [event["args"] for event in made] == [{}, {}, {}, {"bytes": 3 * 4 + 8}, {}]
    for event in made:
        assert event["pid"] == 0
        assert event["tid"] == threading.get_native_id()
    spans = [(float(str(event["ts"])), float(str(event["dur"]))) for event in made]
    assert all(dur >= 0 for _, dur in spans)
    assert all(ts + dur <= after + 1 for (ts, dur), (after, _) in pairwise(spans))


def test_times_are_microseconds_since_1970(tmp_path: Path) -> None:
    marks: list[int] = []

    def work() -> None:
        marks.append(time.perf_counter_ns())
        sum(range(200_000))
        marks.append(time.perf_counter_ns())

    now = time.time()
    strategy = traced(evolve(alone(), barrier=work), tmp_path / "trace.json")
    strategy.barrier()
    strategy.close()
    (barrier, _) = operations(json.loads((tmp_path / "trace.json").read_text()))
    assert float(str(barrier["ts"])) / 1e6 == pytest.approx(now, abs=5)
    assert float(str(barrier["dur"])) >= (marks[1] - marks[0]) / 1e3
    assert float(str(barrier["dur"])) / 1e6 < time.time() - now
    assert time_spent(tmp_path / "trace.json").operations["barrier"].seconds >= (marks[1] - marks[0]) / 1e9


def test_a_run_that_dies_leaves_every_operation_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    strategy = traced(alone(), path)
    strategy.barrier()
    with pytest.raises(ValueError, match="src"):
        strategy.broadcast(1.0, src=7)
    text = path.read_text()  # nothing was closed
    events: list[Event] = json.loads(text.rstrip().removesuffix(",") + "]")
    assert [event["name"] for event in operations(events)] == ["barrier", "broadcast"]
    path.write_text(text[:-20])
    assert set(time_spent(path).operations) == {"barrier"}
    strategy.close()


def test_each_rank_has_its_file_and_merged_they_are_one_picture(tmp_path: Path) -> None:
    ranks = [traced(one_of_two(rank), tmp_path / "trace.json") for rank in range(2)]
    for strategy in ranks:
        strategy.all_gather(torch.zeros(2, dtype=torch.float64))
    ranks[0].close()  # rank 1 does not end well
    paths = [tmp_path / "trace.rank0.json", tmp_path / "trace.rank1.json"]
    assert sorted(tmp_path.iterdir()) == paths
    merge_traces(paths, tmp_path / "all.json")
    events: list[Event] = json.loads((tmp_path / "all.json").read_text())
    assert [(event["pid"], event["name"]) for event in operations(events)] == [
        (0, "all_gather"),
        (0, "close"),
        (1, "all_gather"),
    ]
    assert {str(event["args"]) for event in events if event["name"] == "process_name"} == {
        "{'name': 'rank 0'}",
        "{'name': 'rank 1'}",
    }
    spent = time_spent(tmp_path / "all.json")
    assert spent.operations["all_gather"].calls == 2
    assert spent.operations["all_gather"].bytes_moved == 32
    each = [time_spent(path).wall_seconds for path in paths]
    assert spent.wall_seconds == pytest.approx(sum(each))
    ranks[1].close()


def test_close_logs_the_table_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = traced(alone(), tmp_path / "trace.json")
    strategy.barrier()
    with caplog.at_level(logging.INFO, logger="lightrft.wrappers.traced"):
        strategy.close()
        strategy.close()
    (record,) = caplog.records
    assert str(tmp_path / "trace.json") in record.getMessage()
    assert OUTSIDE in record.getMessage()
    assert "barrier" in record.getMessage()


def test_the_table_adds_up() -> None:
    table = time_table(
        TimeSpent(10.0, {"backward": OperationTime(4, 6.0), "all_reduce": OperationTime(2, 1.0, bytes_moved=4096)})
    )
    rows = [re.split(r"\s*│\s*", line.strip(" │\n")) for line in table.splitlines() if "│" in line]
    assert rows == [
        ["backward", "4", "6.000", "1500.000", "60.0%"],
        [OUTSIDE, "", "3.000", "", "30.0%"],
        ["all_reduce", "2", "1.000", "500.000", "10.0%", "4,096"],
        ["wall", "", "10.000"],
    ]


def test_the_table_of_a_file_is_the_logged_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = traced(alone(), tmp_path / "trace.json")
    for _ in range(3):
        strategy.all_reduce(torch.zeros(5), "sum")
    with caplog.at_level(logging.INFO, logger="lightrft.wrappers.traced"):
        strategy.close()
    spent = time_spent(tmp_path / "trace.json")
    assert spent.operations["all_reduce"].calls == 3
    assert spent.operations["all_reduce"].bytes_moved == 60
    assert spent.wall_seconds >= sum(each.seconds for each in spent.operations.values()) - 1e-5
    counted = re.compile(r"(all_reduce|close)\s*│\s*(\d+)")
    assert counted.findall(time_table(spent)) != []
    assert sorted(counted.findall(time_table(spent))) == sorted(counted.findall(caplog.text))


def test_threads_are_rows_of_their_own(tmp_path: Path) -> None:
    strategy = traced(alone(), tmp_path / "trace.json")

    def work() -> None:
        for _ in range(50):
            strategy.barrier()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    strategy.close()
    made = operations(json.loads((tmp_path / "trace.json").read_text()))
    assert len(made) == 101
    assert threading.get_native_id() not in {event["tid"] for event in made[:100]}


def test_every_operation_is_traced_and_shows_its_true_signature(tmp_path: Path) -> None:
    strategy = alone()
    wrapped = traced(strategy, tmp_path / "trace.json")
    assert {"all_reduce", "optimizer_step", "gather_and_generate", "close"} <= set(OPERATIONS) - UNTRACED
    for operation in OPERATIONS:
        inner: Callable[..., object] = getattr(strategy, operation)
        outer: Callable[..., object] = getattr(wrapped, operation)
        assert (outer is inner) == (operation in UNTRACED)
        assert inspect.signature(outer) == inspect.signature(inner)
    wrapped.close()


def test_wrappers_compose(tmp_path: Path) -> None:
    strategy = compose(one_of_two(1), lambda inner: traced(inner, tmp_path / "trace.json"), checked)
    assert strategy.all_reduce(2.0, "sum") == 2.0
    strategy.close()
    made = operations(json.loads((tmp_path / "trace.rank1.json").read_text()))
    assert [event["name"] for event in made] == ["all_reduce", "close"]


@given(st.lists(st.integers(0, 7), max_size=3), st.sampled_from([torch.bool, torch.bfloat16, torch.int64]))
def test_bytes_are_those_of_the_tensors(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    assert size_of({"a": tensor, "b": {"c": tensor, "d": 1.5}}) == 2 * tensor.untyped_storage().nbytes() + 8
