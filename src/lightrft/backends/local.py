"""``local``: one process, one device, real everything. What the other backends are compared with."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightrft.engines import registry
from lightrft.errors import unsupported
from lightrft.ops.composition import composed, parts_alone, run_state
from lightrft.ops.models import compute_in_bf16, keep_master_weights, place
from lightrft.ops.world import discover
from lightrft.strategy.config import StrategyConfig, refuse_ignored
from lightrft.strategy.protocol import ModelT
from lightrft.strategy.record import RunState, StrategyRecord, bind

NAME = "local"
CARRIES = frozenset({"bf16", "enable_engine_sleep", "engine_mem_util", "weight_sync_bucket_mb"})
"""The configuration fields, of those that are a backend's or an engine's business, that this backend carries out."""


def prepare_model(state: RunState, model: ModelT, optimizer: Optimizer | None) -> ModelT:
    """On the device, and with ``bf16`` computing in bfloat16 on fp32 weights (T10)."""
    if model in state.prepared:
        return model
    state.prepared.add(model)
    place(model, state.device)
    if state.config.bf16:
        keep_master_weights(model)
        compute_in_bf16(model, state.device)
    return model


def build(config: StrategyConfig, args: object = None) -> StrategyRecord:
    """One process on CUDA if there is a device, else on the CPU.

    Raises ``UnsupportedOperation`` under a launcher that started more than one process.
    """
    refuse_ignored(config, NAME, CARRIES)
    world = discover(local_rank=config.local_rank)
    if world.world_size > 1:
        raise unsupported(
            NAME,
            f"world_size={world.world_size} (the launcher started {world.world_size} processes)",
            "start one process, or choose backend='fsdp' or 'deepspeed'",
        )
    device = torch.device("cuda", world.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    run = run_state(config, world, device)
    parts = parts_alone(
        run, prepare_model=prepare_model, setup_inference_engine=bind(registry.setup_inference_engine, run)
    )
    return composed(NAME, run, config if args is None else args, parts)
