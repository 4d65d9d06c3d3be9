"""examples/: what users read runs and learns. That it type-checks: tests/test_typecheck.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def lines_of(*command: str) -> list[str]:
    """What a program prints; it ends by itself and without an error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def numbers_after(word: str, lines: list[str]) -> list[float]:
    """The number that follows a word, in each line that holds it."""
    return [float(line.split(word)[1].split()[0]) for line in lines if word in line]


def test_examples_are_small_and_say_how_to_run_them() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.name for file in files] == ["reinforce.py", "supervised.py"]
    for file in files:
        text = file.read_text()
        assert len(text.splitlines()) <= 80
        assert f"\npython examples/{file.name}\ntorchrun" in text


def test_the_supervised_example_learns() -> None:
    lines = lines_of(str(EXAMPLES / "supervised.py"))
    losses = numbers_after("loss", lines)
    assert losses[-1] < losses[0] / 2
    assert numbers_after("accuracy", lines)[-1] > 0.85


def test_the_reinforce_example_learns() -> None:
    pytest.importorskip("transformers")
    rewards = numbers_after("reward", lines_of(str(EXAMPLES / "reinforce.py"), "--steps", "18"))
    assert rewards[0] < 0.3
    assert min(rewards[-3:]) > 0.6


@pytest.mark.backends
@pytest.mark.parametrize(("example", "word"), [("supervised.py", "accuracy"), ("reinforce.py", "reward")])
def test_the_examples_learn_on_two_ranks(example: str, word: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    values = numbers_after(word, lines_of(*launcher, str(EXAMPLES / example), "--backend", "fsdp"))
    assert values[-1] > 0.85
