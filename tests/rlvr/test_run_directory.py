"""What a run writes, what it refuses, and what it never deletes."""

from __future__ import annotations

import builtins
import json
import logging
import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.errors import TaskError
from lightrft.rlvr.run_directory import (
    RunDirectory,
    Transcript,
    append_metrics,
    draw_chart,
    moving_mean,
    open_run,
    open_scalars,
    read_metrics,
    series,
    truncate_metrics,
    write_config,
    write_transcripts,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = open_run(tmp_path / "runs" / "one", resume=False, overwrite=False)
    write_config(made, 'model = "tiny"\n')
    return made


def without(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    real = builtins.__import__

    def guarded(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith(library):
            raise ImportError(f"No module named {library!r}")
        return real(name, *args, **kwargs)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(builtins, "__import__", guarded)


def test_config_is_toml(run: RunDirectory) -> None:
    assert tomllib.loads(run.config.read_text()) == {"model": "tiny"}


def test_an_empty_directory_is_as_good_as_none(tmp_path: Path) -> None:
    assert open_run(tmp_path, resume=False, overwrite=False).path == tmp_path


def test_a_second_run_is_refused_and_both_ways_out_are_named(run: RunDirectory) -> None:
    with pytest.raises(TaskError, match=r"not empty.*--resume.*--overwrite"):
        open_run(run.path, resume=False, overwrite=False)
    assert run.config.exists()


def test_resume_keeps_everything(run: RunDirectory) -> None:
    append_metrics(run, 1, {"reward": 0.5})
    assert open_run(run.path, resume=True, overwrite=False) == run
    assert read_metrics(run) == [(1, {"reward": 0.5})]


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="does not exist"):
        open_run(tmp_path / "none", resume=True, overwrite=False)
    assert not (tmp_path / "none").exists()
    (tmp_path / "config.toml").write_text("theirs = true\n")
    with pytest.raises(TaskError, match="holds no run"):
        open_run(tmp_path, resume=True, overwrite=False)


def test_resume_and_overwrite_contradict(run: RunDirectory) -> None:
    with pytest.raises(TaskError, match="one of them"):
        open_run(run.path, resume=True, overwrite=True)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TaskError, match="is a file"):
        open_run(tmp_path / "file", resume=False, overwrite=True)
    with pytest.raises(TaskError, match="cannot use"):
        open_run(tmp_path / "file" / "below", resume=False, overwrite=False)


def test_overwrite_deletes_the_run_and_nothing_else(run: RunDirectory, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "weights").write_text("precious")
    run.checkpoints.mkdir()
    (run.checkpoints / "step1").mkdir()
    run.tensorboard.symlink_to(outside, target_is_directory=True)
    append_metrics(run, 1, {"reward": 0.5})
    (run.path / "notes.txt").write_text("mine")
    open_run(run.path, resume=False, overwrite=True)
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]
    assert (outside / "weights").read_text() == "precious"


def test_overwrite_never_touches_a_foreign_directory(tmp_path: Path) -> None:
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_text("theirs = true\n")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(TaskError, match="no run of lightrft"):
        open_run(tmp_path, resume=False, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "config.toml", "metrics.jsonl"]


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_json_even_when_they_are_not_finite(run: RunDirectory) -> None:
    append_metrics(run, 1, {"loss": math.nan, "kl": math.inf, "reward": 0.25})
    assert json.loads(run.metrics.read_text()) == {"step": 1, "loss": None, "kl": None, "reward": 0.25}
    [(step, values)] = read_metrics(run)
    assert step == 1
    assert math.isnan(values["loss"])
    assert values["reward"] == 0.25


@given(st.integers(0, 8))
def test_K2_resuming_drops_what_came_after(tmp_path_factory: pytest.TempPathFactory, resumed: int) -> None:
    run = open_run(tmp_path_factory.mktemp("run"), resume=False, overwrite=False)
    for step in range(1, 7):
        append_metrics(run, step, {"reward": step / 7})
    append_metrics(run, 6, {"accuracy": 0.5})
    truncate_metrics(run, resumed)
    assert [step for step, _ in read_metrics(run)] == [s for s in (1, 2, 3, 4, 5, 6, 6) if s <= resumed]


def test_a_line_that_a_crash_cut_short_is_passed_over_and_gone_after_resuming(run: RunDirectory) -> None:
    append_metrics(run, 1, {"reward": 0.5})
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "rew')
    assert read_metrics(run) == [(1, {"reward": 0.5})]
    truncate_metrics(run, 5)
    append_metrics(run, 2, {"reward": 0.75})
    assert read_metrics(run) == [(1, {"reward": 0.5}), (2, {"reward": 0.75})]


def test_any_other_bad_line_is_named(run: RunDirectory) -> None:
    run.metrics.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(TaskError, match=r"metrics\.jsonl, line 2"):
        read_metrics(run)


def test_no_metrics_yet(run: RunDirectory) -> None:
    assert read_metrics(run) == []
    truncate_metrics(run, 3)
    assert not run.metrics.exists()


def test_tensorboard_scalars_can_be_read_back(run: RunDirectory) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = open_scalars(run)
    for step in (1, 2, 3):
        first.write(step, {"reward": step / 4})
    first.close()
    second = open_scalars(run, resumed_step=2)
    second.write(3, {"reward": 1.0})
    second.close()
    events = accumulators.EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 1.0)]


def test_without_tensorboard_a_run_goes_on(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, "torch.utils.tensorboard")
    with caplog.at_level(logging.WARNING):
        scalars = open_scalars(run)
        for step in range(3):
            scalars.write(step, {"reward": 1.0})
        scalars.close()
    assert len(caplog.records) == 1
    assert "lightrft[train]" in caplog.text
    assert not run.tensorboard.exists()


# -- transcripts -----------------------------------------------------------------------------------------------------


def test_transcripts_are_readable(run: RunDirectory) -> None:
    write_transcripts(run, "Before training", [Transcript("What is 3 + 4?", "7", "3 + 4 = 7\n## Fake\n# Out", 0.0)])
    write_transcripts(
        run, "After 22 steps", [Transcript("What is 3 + 4?", "7", "7", 1.0), Transcript("Q", "8", "", 0.0)]
    )
    text = run.transcripts.read_text()
    assert text.index("## Before training") < text.index("## After 22 steps")
    assert "0 of 1 exactly right" in text
    assert "1 of 2 exactly right" in text
    assert "    answer    3 + 4 = 7\n              ## Fake" in text
    assert "(nothing)" in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Transcripts",
        "## Before training",
        "## After 22 steps",
    ]


def test_a_section_written_again_replaces_the_older_one_and_leaves_the_others(run: RunDirectory) -> None:
    for title, answer in (("Before training", "first"), ("Before", "kept"), ("Before training", "second")):
        write_transcripts(run, title, [Transcript("q", "a", answer, 0.0)])
    write_transcripts(run, "Before", [Transcript("q", "a", "kept", 0.0)])
    text = run.transcripts.read_text()
    assert "first" not in text
    assert text.count("second") == text.count("kept") == 1


# -- the chart -------------------------------------------------------------------------------------------------------


def test_series_takes_what_was_recorded() -> None:
    rows = [(0, {"accuracy": 0.0}), (1, {"reward": 0.5}), (2, {"reward": math.nan}), (3, {"reward": 1.0})]
    assert series(rows, "reward") == ([1, 3], [0.5, 1.0])


def test_moving_mean_by_hand() -> None:
    assert moving_mean([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_chart(run: RunDirectory, steps: int) -> None:
    pytest.importorskip("matplotlib")
    for step in range(1, steps + 1):
        append_metrics(run, step, {"reward": step / 40, "length": 8 - step / 10, "loss": math.nan})
        if step % 10 == 0:
            append_metrics(run, step, {"accuracy": step / 50})
    draw_chart(run)
    assert run.chart.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in run.path.glob("*.partial")) == []


def test_without_matplotlib_a_run_goes_on(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, "matplotlib")
    with caplog.at_level(logging.WARNING):
        draw_chart(run)
    assert "lightrft[train]" in caplog.text
    assert not run.chart.exists()
