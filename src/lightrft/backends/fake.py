"""``fake``: the test double. Trains for real in one process on the CPU; its rollout is null until it is given an engine.

Nothing here calls CUDA, opens a network or starts a process, at import or later (F1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve
from torch.nn import Module

from lightrft.engines.protocol import Completion, Engine
from lightrft.ops.composition import composed, parts_alone, run_state
from lightrft.ops.preparation import leave_as_is
from lightrft.ops.world import World
from lightrft.strategy.config import StrategyConfig, refuse_ignored
from lightrft.strategy.record import RunState, StrategyRecord, bind

NAME = "fake"
CARRIES = frozenset({"bf16", "enable_engine_sleep", "engine_mem_util", "weight_sync_bucket_mb"})
"""``bf16`` is taken, and the model's own precision is kept either way (F2)."""


def no_engine(state: RunState, args: object, engine_type: str | Engine = "vllm", actor: Module | None = None) -> None:
    """There is none to set up."""


def engine_given(
    state: RunState, args: object, engine_type: str | Engine = "vllm", actor: Module | None = None
) -> Engine | None:
    """The one that the fake was built with, whatever is asked for."""
    return state.engine.engine


def update_nothing(state: RunState, actor: Module) -> None:
    """There is nothing to update."""


def sleep_not(state: RunState) -> None:
    """There is nothing to put to sleep or to wake."""


def generate_nothing(
    state: RunState,
    sampling_params: object,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    multi_modal_inputs: Sequence[Mapping[str, object]] | None = None,
) -> list[Completion]:
    """Empty results."""
    return []


def gather_nothing(
    state: RunState,
    sampling_params: object,
    all_prompt_token_ids: Sequence[Sequence[int]] | None = None,
    all_prompts: Sequence[str] | None = None,
    all_images: Sequence[object] | None = None,
    sleep_engine: bool = True,
    images_num: Sequence[int] | None = None,
    all_videos: Sequence[object] | None = None,
    videos_num: Sequence[int] | None = None,
) -> list[Completion]:
    """Empty results."""
    return []


def without_rollout(strategy: StrategyRecord, run: RunState) -> StrategyRecord:
    """The strategy with nulls for a rollout."""
    return evolve(
        strategy,
        setup_inference_engine=bind(no_engine, run),
        update_engine_weights=bind(update_nothing, run),
        maybe_sleep_inference_engine=bind(sleep_not, run),
        wakeup_inference_engine=bind(sleep_not, run),
        engine_generate_local=bind(generate_nothing, run),
        gather_and_generate=bind(gather_nothing, run),
    )


def build(config: StrategyConfig, args: object = None, engine: Engine | None = None) -> StrategyRecord:
    """Rank 0 of 1, whatever the environment says. With an ``engine`` the rollout is that engine's (F2)."""
    refuse_ignored(config, NAME, CARRIES)
    run = run_state(config, World(), torch.device("cpu"))
    run.engine.engine = engine
    parts = parts_alone(run, prepare_model=leave_as_is, setup_inference_engine=bind(engine_given, run))
    strategy = composed(NAME, run, config if args is None else args, parts)
    return without_rollout(strategy, run) if engine is None else strategy
