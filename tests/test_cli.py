"""The command line as a person meets it: what it leaves, how it ends, what it says of a mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightrft import cli

TINY = [
    "--model", "tiny", "--task", "copy", "--max-new-tokens", "1", "--train-batch-size", "8",
    "--micro-train-batch-size", "8", "--n-samples-per-prompt", "4", "--eval-limit", "4", "--actor-learning-rate", "1e-3",
]  # fmt: skip


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "lightrft", *words]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a user's mistake says; never a traceback, always exit code 2."""
    try:
        code: object = cli.run_command(words)
    except SystemExit as end:  # tyro's own refusals
        code = end.code
    captured = capsys.readouterr()
    assert code == 2, captured
    assert "Traceback" not in captured.err + captured.out
    return " ".join((captured.err + captured.out).replace("│", " ").split())


def metrics(run: Path) -> list[dict[str, float]]:
    timing = ("seconds", "rollout_seconds", "tokens_per_second", "rollout_tokens_per_second")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in timing} for row in rows]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step{step}" / "model.safetensors")


def test_train_leaves_everything_and_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = [*TINY, "--steps", "4", "--eval-every", "2", "--save-every", "2", "--keep-checkpoints", "0"]
    assert cli.run_command(["train", *settings, "--output", str(whole), "--quiet"]) == 0
    for name in ("config.toml", "metrics.jsonl", "reward.png", "transcripts.md", "tensorboard"):
        assert (whole / name).exists()
    assert (whole / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert tomllib.loads((whole / "config.toml").read_text())["strategy"]["train_batch_size"] == 8

    assert cli.run_command(["train", *settings, "--output", str(parts), "--quiet"]) == 0
    for late in ("step3", "step4"):
        if (parts / "checkpoints" / late).exists():
            import shutil

            shutil.rmtree(parts / "checkpoints" / late)
    (parts / "checkpoints" / "latest").write_text("step2")
    assert cli.run_command(["train", "--resume", "--output", str(parts), "--quiet"]) == 0
    assert metrics(parts) == metrics(whole)
    assert all(torch.equal(tensor, weights(whole, 4)[name]) for name, tensor in weights(parts, 4).items())


def test_a_runs_checkpoints_are_shown_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    settings = [*TINY, "--steps", "2", "--save-every", "1", "--eval-every", "0", "--quiet"]
    assert cli.run_command(["train", *settings, "--output", str(run)]) == 0
    capsys.readouterr()
    assert cli.run_command(["checkpoints", str(run), "--verify"]) == 0
    assert "step2 (latest)" in capsys.readouterr().out
    assert cli.run_command(["checkpoints", str(run), "--prune", "1"]) == 0  # the run has given up its lock
    assert "step1" in capsys.readouterr().out
    assert not (run / "checkpoints" / "step1").exists()
    assert cli.run_command(["export", str(run), str(out)]) == 0  # which model, its settings say
    stored = load_file(out / "model.safetensors")
    assert stored
    assert all(torch.equal(tensor, weights(run, 2)[name]) for name, tensor in stored.items())
    assert (
        cli.run_command(["train", *TINY, "--model", str(out), "--steps", "1", "--output", str(tmp_path / "more")]) == 0
    )


def test_a_second_run_is_refused_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [*TINY, "--steps", "1", "--output", str(tmp_path / "run"), "--quiet"]
    assert cli.run_command(["train", *run]) == 0
    said = refused(capsys, "train", *run)
    assert "--resume" in said
    assert "--overwrite" in said
    assert cli.run_command(["train", *run, "--overwrite"]) == 0


def test_ctrl_c_saves_and_is_130(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        command("train", *TINY, "--steps", "100000", "--eval-every", "0", "--output", str(run)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("step") and "loss" in line:
                process.send_signal(signal.SIGINT)
                break
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, rest
    assert "--resume" in rest
    tag = (run / "checkpoints" / "latest").read_text().strip()
    steps = [row["step"] for row in metrics(run) if "loss" in row]
    assert tag == f"step{int(steps[-1])}"
    assert (
        cli.run_command(["train", "--resume", "--output", str(run), "--steps", str(int(steps[-1]) + 1), "--quiet"]) == 0
    )


def test_mistakes_name_the_culprit_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "a", "answer": "b"}\n{"question": "c"}\n')
    (tmp_path / "mine.py").write_text(
        "def fails(task, text):\n    raise KeyError('oops')\n\n\ndef nan(task, text):\n    return float('nan')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    long = tmp_path / "long.jsonl"
    long.write_text('{"question": "%s", "answer": "1"}\n{"question": "short", "answer": "1"}\n' % ("9" * 600))
    out = ["--output", str(tmp_path / "run"), "--steps", "1"]
    cases = {
        ("--model", str(tmp_path / "nowhere")): "nowhere",
        ("--task", str(tmp_path / "missing.jsonl")): "missing.jsonl",
        ("--task", str(bad)): "line 2",
        ("--task", str(long)): "600 tokens",
        ("--task", "reasoning-gym:chain_sun"): "chain_sum",
        ("--reward", "mine:absent"): "absent",
        ("--backend", "lokal"): "local",
        ("--backend", "local", "--zpg", "2"): "zpg=2",
        ("--critic-pretrain",): "critic_pretrain",
        ("--train-batch-size", "6"): "train_batch_size",
        ("--engine-type", "vllm"): "lightrft[vllm]",
    }
    for words, culprit in cases.items():
        said = refused(capsys, "train", *TINY, *out, *words)
        assert culprit in said, (words, said)
        assert not (tmp_path / "run").exists(), words
    for reward, culprit in (("mine:fails", "oops"), ("mine:nan", "nan")):
        said = refused(capsys, "train", *TINY, *out, "--overwrite", "--reward", reward)
        assert culprit in said
        assert reward in said


def test_one_error_lists_every_bad_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(
        'steps = 0\n[strategy]\nzero_stage = 4\nbf16 = "maybe"\ntrain_batch_size = 8.5\nactor_learning_rate = -1\n'
    )
    said = refused(capsys, "train", "--config", str(file))
    for name in ("zero_stage", "bf16", "train_batch_size", "actor_learning_rate"):
        assert name in said


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = subprocess.run(
        command("train", "--debug", "--task", str(tmp_path / "no.jsonl"), "--output", str(tmp_path / "run")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_help_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert cli.run_command(["--version"]) == 0
    assert "there is no command 'trian'" in refused(capsys, "trian")
    with pytest.raises(SystemExit) as end:
        cli.run_command(["train", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "--zero-stage" in text
    assert "--max-new-tokens" in text


def test_doctor_names_what_is_missing_and_the_line_that_gets_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "local" in text
    assert "torch" in text
    from importlib.util import find_spec

    if find_spec("sglang") is None:
        assert "pip install 'lightrft[sglang]'" in text


def test_demo_tiny_learns_in_under_a_minute(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    result = subprocess.run(
        command("demo", "--model", "tiny", "--output", str(run)),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    assert "held-out accuracy" in result.stdout
    accuracy = [row["accuracy"] for row in metrics(run) if "accuracy" in row]
    assert accuracy[-1] - accuracy[0] >= 0.3
