"""typings/ against the real packages: stubtest finds no difference but those in typings/allowed, and none of these is stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TYPINGS = Path(__file__).parents[1] / "typings"


@pytest.mark.parametrize(
    ("library", "imports"),
    [
        ("reasoning_gym", "reasoning_gym"),
        pytest.param("deepspeed", "deepspeed", marks=pytest.mark.slow),
        pytest.param("vllm", "vllm", marks=pytest.mark.engines),
        pytest.param("sglang", "sglang.srt.entrypoints.engine", marks=pytest.mark.engines),
    ],
)
def test_stubs_say_what_is_true(library: str, imports: str) -> None:
    pytest.importorskip("mypy")
    found = subprocess.run([sys.executable, "-c", f"import {imports}"], capture_output=True, text=True, timeout=300)
    if found.returncode:
        pytest.skip(f"{imports} cannot be imported: {found.stderr.strip().splitlines()[-1]}")
    allowed = TYPINGS / "allowed" / f"{library}.txt"
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", library, "--ignore-missing-stub", "--concise"]
        + (["--allowlist", str(allowed)] if allowed.exists() else []),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "MYPYPATH": str(TYPINGS), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=TYPINGS.parent / "tests",  # no configuration of mypy's there
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_difference_that_is_allowed_has_its_reason() -> None:
    for file in (TYPINGS / "allowed").glob("*.txt"):
        for block in file.read_text().strip().split("\n\n")[1:]:
            assert block.startswith("# "), f"{file.name}: {block}"
