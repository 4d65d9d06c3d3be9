"""FC18: no field of the configuration is documented and then read by nobody (C7)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightrft
from lightrft import StrategyConfig
from lightrft.backends import deepspeed, fake, fsdp, local
from lightrft.errors import UnsupportedOperation
from lightrft.rlvr.config import CARRIES as TRAINER_CARRIES
from lightrft.rlvr.config import TrainConfig, checked
from lightrft.strategy.config import DEFAULTS, owner_of

SOURCE = {
    path: path.read_text()
    for path in Path(lightrft.__file__).parent.rglob("*.py")
    if path.name not in ("config.py", "demo.py")
}
BACKENDS = (deepspeed, fake, fsdp, local)
NAMES_THE_BACKEND = {"backend", "fsdp", "engine_type", "local_rank"}
OTHER: dict[str, object] = {
    "zero_stage": 3, "fsdp_cpu_offload": True, "adam_offload": True, "zpg": 2, "grad_accum_dtype": "fp32",
    "overlap_comm": True, "sp_size": 2, "critic_learning_rate": 1e-3, "critic_pretrain": True,
    "remote_rm_url": "http://localhost", "pretrain_data": "data", "fused_linear_logprob": True,
    "dynamic_sampling": True, "mixed_mm_data": True, "use_mp_opt": True, "engine_tp_size": 2,
    "engine_mem_util": 0.9, "weight_sync_bucket_mb": 64, "micro_rollout_batch_size": 4,
}  # fmt: skip
"""For each field that something refuses, a value other than its default."""


def read_somewhere(name: str) -> bool:
    return any(re.search(rf"\.{name}\b", text) for text in SOURCE.values())


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_FC18_C7_is_read_or_refused(name: str) -> None:
    if name in OTHER:
        config = StrategyConfig.from_args({name: OTHER[name], "train_batch_size": 128})
        if owner_of(name) == "trainer":
            with pytest.raises(UnsupportedOperation, match=name):
                checked(TrainConfig(strategy=config))
        else:
            for backend in BACKENDS:
                if name not in backend.CARRIES:
                    with pytest.raises(UnsupportedOperation, match=name):
                        backend.build(config)
    else:
        assert read_somewhere(name), f"{name} is refused by nothing and read by nothing"


def test_what_is_said_to_be_carried_out_is_read() -> None:
    for name in TRAINER_CARRIES.union(*(backend.CARRIES for backend in BACKENDS)):
        assert read_somewhere(name) or name in NAMES_THE_BACKEND, name
    assert local.CARRIES - {"bf16"} <= fake.CARRIES
