"""``torchrun -m lightrft train``: the demo's tiny task, on two ranks, ends where one process ends (part of T6)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
SETTINGS = [
    *("--model", "tiny", "--task", "copy", "--reward", "support:varied", "--steps", "5", "--max-new-tokens", "4"),
    *("--train-batch-size", "32", "--micro-train-batch-size", "4", "--n-samples-per-prompt", "4"),
    *("--actor-learning-rate", "1e-3", "--lr-warmup-ratio", "0", "--eval-every", "0", "--eval-limit", "20"),
]
BACKENDS = (
    ["fsdp"],
    *(["deepspeed", "--zero-stage", str(stage)] for stage in range(4)),
    ["fsdp", "--updates-per-rollout", "2"],
)


def run(words: Sequence[str], ranks: int = 1, start: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """``python -m lightrft``, or the same under torchrun on a port that it finds, or by what ``start`` says."""
    command, environ = started_by(words, ranks, start)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


def started_by(words: Sequence[str], ranks: int = 1, start: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The command and its environment."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [*(start or [sys.executable, *torchrun]), "-m", "lightrft", *words]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    clean |= {"PYTHONUNBUFFERED": "1", "TORCHRUN": f"{sys.executable} -m torch.distributed.run"}
    return command, clean


def train(output: Path, backend: Sequence[str], ranks: int) -> subprocess.CompletedProcess[str]:
    result = run(["train", *SETTINGS, "--output", str(output), "--backend", *backend], ranks)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def furthest(first: Path, second: Path) -> float:
    """The largest difference between the parameters of two runs."""
    ended = [load_file(output / "checkpoints" / "step5" / "model.safetensors") for output in (first, second)]
    assert ended[0].keys() == ended[1].keys()
    return max(float((ended[0][name] - ended[1][name]).abs().max()) for name in ended[0])


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The runs on ``local`` that the others are compared with, by the settings that differ."""
    made = {}
    for extra in ((), ("--updates-per-rollout", "2")):
        output = tmp_path_factory.mktemp("local") / "run"
        train(output, ["local", *extra], 1)
        made[" ".join(extra)] = output
    return made


@pytest.mark.backends
@pytest.mark.parametrize("backend", BACKENDS, ids=" ".join)
def test_T6_two_ranks_learn_what_one_process_learns(
    one_process: dict[str, Path], tmp_path: Path, backend: list[str]
) -> None:
    extra = " ".join(backend[1:]) if "--updates-per-rollout" in backend else ""
    result = train(tmp_path / "run", backend, 2)
    assert furthest(one_process[extra], tmp_path / "run") <= 5e-5
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(step.get("grad_norm", 0.0) > 0.1 for step in steps), "nothing was learned that could differ"
    # One progress display and one summary, not one for each rank.
    assert result.stdout.count("done: step 5/5") + result.stderr.count("done: step 5/5") == 1
    assert result.stdout.count("held-out accuracy:") == 1


@pytest.mark.backends
def test_a_traced_and_checked_run_of_two_ranks_draws_both_and_changes_nothing(
    one_process: dict[str, Path], tmp_path: Path
) -> None:
    words = ["train", *SETTINGS, "--output", str(tmp_path / "run"), "--backend", "fsdp", "--check-ranks"]
    result = run([*words, "--trace", str(tmp_path / "trace.json")], 2)
    assert result.returncode == 0, result.stderr[-3000:]
    assert furthest(one_process[""], tmp_path / "run") <= 5e-5
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())
        assert {"backward", "optimizer_step", "gather_and_generate"} <= {event["name"] for event in events}
    assert result.stderr.count("outside lightrft") == 1, "one table, that of rank 0"


@pytest.mark.backends
@pytest.mark.slow
def test_T6_two_nodes_learn_what_one_process_learns(one_process: dict[str, Path], tmp_path: Path) -> None:
    words = ["train", *SETTINGS, "--output", str(tmp_path / "run"), "--backend", "fsdp"]
    result = run(words, start=[str(ROOT / "scripts" / "two_nodes.sh")])
    if result.returncode == 77:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 0, result.stderr[-3000:]
    assert furthest(one_process[""], tmp_path / "run") <= 5e-5
    assert result.stdout.count("held-out accuracy:") == 1


@pytest.mark.backends
def test_a_run_of_two_ranks_resumes(tmp_path: Path) -> None:
    words = ["train", *SETTINGS, "--backend", "fsdp", "--output"]
    assert run([*words, str(tmp_path / "whole")], 2).returncode == 0
    short = [word if word != "5" else "3" for word in words]
    assert run([*short, str(tmp_path / "parts")], 2).returncode == 0
    result = run([*words, str(tmp_path / "parts"), "--resume"], 2)
    assert result.returncode == 0, result.stderr[-3000:]
    weights = [
        load_file(tmp_path / name / "checkpoints" / "step5" / "model.safetensors") for name in ("whole", "parts")
    ]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.backends
@pytest.mark.parametrize(("backend", "ranks"), [("local", 1), ("fsdp", 2)])
def test_K2_killed_at_any_moment_it_goes_on_as_if_it_had_not_been(tmp_path: Path, backend: str, ranks: int) -> None:
    words = ["train", *SETTINGS, "--save-every", "1", "--backend", backend, "--output"]
    assert run([*words, str(tmp_path / "whole")], ranks).returncode == 0
    command, environ = started_by([*words, str(tmp_path / "killed")], ranks)
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/5  reward"):
            break
    # Somewhere between the end of step 3 and that of step 4: a save may be in progress, and is not waited for.
    for pid in group_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "checkpoints" / "step5").exists()
    result = run([*words, str(tmp_path / "killed"), "--resume"], ranks)
    assert result.returncode == 0, result.stderr[-3000:]
    assert furthest(tmp_path / "whole", tmp_path / "killed") == 0.0


def group_of(leader: int) -> list[int]:
    """All processes below one: torchrun starts its ranks in sessions of their own."""
    found = [leader]
    for pid in found:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        if children.exists():
            found += map(int, children.read_text().split())
    return found


@pytest.mark.backends
def test_a_mistake_on_two_ranks_is_told_once_and_ends_all(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep")
    result = run(["train", *SETTINGS, "--backend", "fsdp", "--output", str(tmp_path / "run")], 2)
    assert result.returncode != 0
    assert result.stderr.count("lightrft (rank 0):") == 1
    assert "Traceback (most recent call last):\n  File" not in result.stderr.split("torch/distributed")[0]
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_without_a_launcher_it_says_what_to_type(backend: str) -> None:
    result = run(["train", "--backend", backend, "--model", "tiny"])
    assert result.returncode == 2
    assert f"torchrun --nproc-per-node 2 -m lightrft train --backend {backend} --model tiny" in result.stderr
    assert "Traceback" not in result.stderr
