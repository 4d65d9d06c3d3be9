"""What `lightrft checkpoints` says of a directory, and what it removes (K5, K6)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightrft import cli
from lightrft.checkpoints.layout import list_checkpoints, write_checkpoint
from lightrft.checkpoints.report import bytes_in, examine, no_run_saves_into, remove, superfluous
from lightrft.errors import CheckpointError

CONTENT = b"0123456789" * 1000


def save(root: Path, step: int) -> Path:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(CONTENT)
        (directory / "counters.json").write_bytes(b"{}")

    return write_checkpoint(
        root, f"step{step}", write, backend="fsdp", world_size=2, step=step, max_num=0, save_latest=True
    )


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and what was printed, on one line each cell apart."""
    code = cli.run_command(["checkpoints", *words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.out + captured.err


def names(root: Path) -> list[str]:
    return [found.path.name for found in list_checkpoints(root)]


# --- the report


def test_whole_checkpoints_the_last_committed_first(tmp_path: Path) -> None:
    for step in (20, 3, 100):
        save(tmp_path, step)
    report = examine(tmp_path, verify=True)
    assert [entry.path.name for entry in report.entries] == ["step100", "step3", "step20"]
    assert [entry.is_latest for entry in report.entries] == [True, False, False]
    assert report.is_whole
    assert not report.foreign
    assert not report.unfinished


def test_K6_each_kind_of_damage_is_told_with_its_file(tmp_path: Path) -> None:
    for step in range(6):
        save(tmp_path, step)
    flip(tmp_path / "step0" / "model.safetensors")
    (tmp_path / "step1" / "counters.json").unlink()
    (tmp_path / "step2" / "model.safetensors").write_bytes(CONTENT[:-1])
    flip(tmp_path / "step3" / "manifest.json")
    (tmp_path / "step4" / "manifest.json").write_bytes(b"")
    quick = {entry.path.name: entry.problems for entry in examine(tmp_path).entries}
    thorough = {entry.path.name: entry.problems for entry in examine(tmp_path, verify=True).entries}
    assert quick["step0"] == ()  # its size is right
    assert thorough["step0"] == (f"{tmp_path}/step0/model.safetensors is damaged: its checksum does not match",)
    for problems in (quick, thorough):
        assert problems["step1"] == (f"{tmp_path}/step1/counters.json is missing",)
        assert problems["step2"] == (f"{tmp_path}/step2/model.safetensors has 9999 bytes, not 10000",)
        assert f"{tmp_path}/step3/manifest.json" in problems["step3"][0]
        assert f"{tmp_path}/step4/manifest.json" in problems["step4"][0]
        assert problems["step5"] == ()


def test_every_byte_is_told_to_the_progress_bar(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path, step)
    (tmp_path / "step1" / "counters.json").unlink()
    read: list[int] = []
    examine(tmp_path, verify=True, advance=read.append)
    assert sum(read) == bytes_in(tmp_path) == 3 * (len(CONTENT) + 2)


def test_FC27_what_is_not_ours_is_named_and_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"format": "of somebody else"}')
    (tmp_path / ".tmp-step2-77-0123abcd").mkdir()
    with no_run_saves_into(tmp_path):
        pass
    assert (tmp_path / ".lock").exists()
    report = examine(tmp_path)
    assert report.is_whole
    assert report.foreign == ("notes.txt", "other")
    assert report.unfinished == (".tmp-step2-77-0123abcd",)


def test_a_copy_and_a_lost_latest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step1", tmp_path / "best")
    (tmp_path / "latest").write_text("step7")
    report = examine(tmp_path)
    assert {entry.path.name: entry.is_copy for entry in report.entries} == {"step1": False, "best": True}
    assert report.problem == f"{tmp_path}/latest names 'step7', and there is no such checkpoint"
    assert not report.is_whole


def test_a_directory_of_a_run_is_understood_and_others_are_explained(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 1)
    assert examine(tmp_path / "run").directory == tmp_path / "run" / "checkpoints"
    (tmp_path / "empty").mkdir()
    for path, reason in (
        (tmp_path / "missing", "there is no such directory"),
        (tmp_path / "empty", "It is empty"),
        (tmp_path / "run" / "checkpoints" / "step1", "is itself a checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=f"{path}.*{reason}"):
            examine(path)


def test_the_report_needs_no_torch() -> None:
    code = "import sys, lightrft.cli, lightrft.checkpoints.report; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- pruning


def test_K5_the_newest_whole_ones_and_the_latest_stay(tmp_path: Path) -> None:
    for step in range(6):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step1")
    (tmp_path / "step4" / "counters.json").unlink()
    report = examine(tmp_path)
    assert [entry.path.name for entry in superfluous(report, 2)] == ["step2", "step0"]
    assert superfluous(report, 6) == ()
    for keep in (0, -1):
        with pytest.raises(CheckpointError, match="at least 1"):
            superfluous(report, keep)
    left = report
    for entry in superfluous(report, 2):
        left = remove(left, entry)
    assert left == examine(tmp_path)
    assert names(tmp_path) == ["step5", "step4", "step3", "step1"]


def test_K5_copies_foreign_and_unreadable_directories_are_not_pruned(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "step0", tmp_path / "best")
    flip(tmp_path / "step1" / "manifest.json")
    assert [entry.path.name for entry in superfluous(examine(tmp_path), 1)] == ["step0"]


RUN = """
import sys
from lightrft.checkpoints.layout import keep_others_out
keep_others_out(sys.argv[1], {})
print("mine", flush=True)
sys.stdin.read()
"""


def test_K4_nothing_is_pruned_under_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(3):
        save(tmp_path, step)
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "mine\n"
        code, text = shown(capsys, str(tmp_path), "--prune", "1")
        assert code == 2
        assert f"cannot prune {tmp_path}: another run saves there, process {run.pid} on" in text
        assert names(tmp_path) == ["step2", "step1", "step0"]
        assert shown(capsys, str(tmp_path), "--prune", "1", "--dry-run")[0] == 0
        assert shown(capsys, str(tmp_path))[0] == 0
    assert shown(capsys, str(tmp_path), "--prune", "1")[0] == 0
    assert names(tmp_path) == ["step2"]


def test_K4_while_it_prunes_no_run_can_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with no_run_saves_into(tmp_path):
        refused = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path)], input="", capture_output=True, text=True, check=False
        )
    assert "another run saves there" in refused.stderr
    subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], input="", capture_output=True, text=True, check=True)


# --- the command


def test_the_table_and_exit_code_of_whole_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    code, text = shown(capsys, str(tmp_path))
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "step" in line]
    rows = [row for row in rows if row and row[0].startswith("step")]
    assert [row[:6] for row in rows] == [
        ["step2 (latest)", "whole", "2", "fsdp", "2", "10.0 kB"],
        ["step1", "whole", "1", "fsdp", "2", "10.0 kB"],
    ]
    assert rows[0][6][:2] == "20"
    assert "--verify reads every file" in text


def test_a_damaged_one_is_named_with_its_reason_and_gives_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    flip(tmp_path / "step1" / "model.safetensors")
    assert shown(capsys, str(tmp_path))[0] == 0
    code, text = shown(capsys, str(tmp_path), "--verify")
    assert code == 1
    assert f"Damaged:\n  {tmp_path}/step1/model.safetensors is damaged: its checksum does not match" in text
    (tmp_path / "step2" / "manifest.json").write_text("{")
    assert shown(capsys, str(tmp_path))[0] == 1


def test_prune_says_what_it_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(4):
        save(tmp_path, step)
    code, text = shown(capsys, str(tmp_path), "--prune", "2", "--dry-run")
    assert code == 0
    assert f"would remove {tmp_path}/step1, 10.0 kB" in text
    assert names(tmp_path) == ["step3", "step2", "step1", "step0"]
    code, text = shown(capsys, str(tmp_path), "--prune", "2")
    assert code == 0
    for step in (1, 0):
        assert f"removed {tmp_path}/step{step}, 10.0 kB" in text
    assert names(tmp_path) == ["step3", "step2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "latest", "step2", "step3"]


def test_prune_with_verify_counts_whole_ones_by_checksum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(3):
        save(tmp_path, step)
    flip(tmp_path / "step2" / "model.safetensors")
    flip(tmp_path / "step0" / "model.safetensors")
    code, _ = shown(capsys, str(tmp_path), "--prune", "1", "--verify")
    assert code == 1
    assert names(tmp_path) == ["step2", "step1"]


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "ours", 1)
    for words, reason in (
        ((str(tmp_path / "missing"),), "no such directory"),
        ((str(tmp_path / "missing"), "--prune", "1"), "no such directory"),
        ((str(tmp_path / "ours"), "--prune", "0"), "at least 1"),
        ((str(tmp_path / "ours"), "--dry-run"), "--prune"),
    ):
        code, text = shown(capsys, *words)
        assert code == 2
        assert reason in text
    assert not (tmp_path / "missing").exists()
