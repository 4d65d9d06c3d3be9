"""The demonstration: a model gets better at a task, in minutes on a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lightrft.rlvr.config import TrainConfig
from lightrft.strategy.config import StrategyConfig

SMOLLM2 = TrainConfig(
    model="smollm2",
    task="additions",
    output="runs/demo",
    steps=30,
    max_new_tokens=8,
    eval_every=10,
    strategy=StrategyConfig(
        backend="local",
        engine_type="hf",
        bf16=False,
        use_tensorboard=True,
        train_batch_size=96,
        micro_train_batch_size=96,
        n_samples_per_prompt=16,
        actor_learning_rate=1e-5,
        lr_warmup_ratio=0.0,
    ),
)
"""SmolLM2-135M-Instruct learns to answer one-digit additions with the bare number."""

TINY = TrainConfig(
    model="tiny",
    task="copy",
    output="runs/demo-tiny",
    steps=100,
    max_new_tokens=1,
    eval_every=25,
    strategy=StrategyConfig(
        backend="local",
        engine_type="hf",
        bf16=False,
        use_tensorboard=True,
        train_batch_size=256,
        micro_train_batch_size=256,
        n_samples_per_prompt=16,
        actor_learning_rate=1e-3,
        lr_warmup_ratio=0.05,
    ),
)
"""A random model of 0.1 million parameters learns to copy a digit."""

DEMOS: Mapping[str, TrainConfig] = MappingProxyType({"smollm2": SMOLLM2, "tiny": TINY})
