"""How far from one process a run on two ranks ends: the largest difference of any parameter (T6)."""

from __future__ import annotations

from benchmarks.figures import Figure
from lightrft.backends import deepspeed, fsdp
from lightrft.conformance.law import run_body
from lightrft.conformance.parity import language_model_difference, mlp_difference
from lightrft.conformance.pool import rank_pool
from lightrft.strategy.protocol import BuildStrategy

RANKS = 2
BACKENDS: dict[str, tuple[BuildStrategy, dict[str, object]]] = {
    "fsdp": (fsdp.build, {}),
    **{f"ZeRO {stage}": (deepspeed.build, {"zero_stage": stage}) for stage in range(4)},
}
MODELS = {
    "MLP, 6 AdamW updates": (mlp_difference, 1e-6),
    "2-layer Qwen2, 5 AdamW updates": (language_model_difference, 5e-5),
}


def measure() -> list[Figure]:
    """For each backend and model the larger of the differences at 1 and 2 samples a micro-batch."""
    figures = []
    with rank_pool(RANKS, timeout=120.0) as pool:
        for name, (build, fields) in BACKENDS.items():
            for model, (difference, bound) in MODELS.items():
                found = max(max(pool.run(run_body, build, fields, difference, {"micro": micro})) for micro in (1, 2))
                figures.append(
                    Figure(
                        name=f"{name}, {RANKS} ranks, {model}: furthest parameter from torch in one process",
                        ours=f"{found:.1e}",
                        rival="",
                        ratio=None,
                        target=f"<= {bound:.0e}",
                        met=found <= bound,
                    )
                )
    return figures
