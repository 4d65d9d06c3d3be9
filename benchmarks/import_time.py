"""How long ``import lightrft`` takes, in a fresh interpreter, beside an interpreter that imports nothing."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.figures import Figure

LIMIT = 0.1
SNIPPET = """
import sys, time
begin = time.perf_counter()
import {module}
print(time.perf_counter() - begin, "torch" in sys.modules)
"""


def imported(module: str) -> tuple[float, bool]:
    """Seconds, and whether torch came along."""
    snippet = SNIPPET.format(module=module)
    result = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=True)
    elapsed, with_torch = result.stdout.split()
    return float(elapsed), with_torch == "True"


def measure(rounds: int = 10) -> list[Figure]:
    """Alternates our import and torch's."""
    ours, torch = [], []
    heavy = False
    for _ in range(rounds):
        elapsed, with_torch = imported("lightrft, lightrft.strategy")
        heavy |= with_torch
        ours.append(elapsed)
        torch.append(imported("torch")[0])
    mine, theirs = statistics.median(ours), statistics.median(torch)
    return [
        Figure(
            name="import lightrft, lightrft.strategy (rival: import torch)",
            ours=f"{mine:.3f} s",
            rival=f"{theirs:.3f} s",
            ratio=mine / theirs,
            target=f"< {LIMIT} s, without torch",
            met=mine < LIMIT and not heavy,
            note="torch was loaded" if heavy else "torch not in sys.modules",
        )
    ]
