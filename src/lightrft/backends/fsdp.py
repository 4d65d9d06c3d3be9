"""``fsdp``: PyTorch's FSDP2 (``fully_shard``), gloo on CPU and NCCL on CUDA, over a mesh of ranks.

One shard group spans the ranks of a machine; several machines hold replicas of it (HSDP).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from attrs import evolve
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import Module
from torch.optim import Optimizer

from lightrft.engines import registry
from lightrft.errors import ConfigError
from lightrft.ops import accumulation, ranks, seeds
from lightrft.ops.accumulation import IN_PARAMETERS
from lightrft.ops.collectives_of_ranks import collecting
from lightrft.ops.composition import Parts, composed, run_state
from lightrft.ops.meta_init import filling
from lightrft.ops.models import keep_master_weights, reshard
from lightrft.ops.peers import note_peers_in_forward
from lightrft.ops.sharding import blocks_of, let_go, names_in_groups, refuse_stepped, repoint
from lightrft.ops.whole_state import SHARDED
from lightrft.strategy.config import StrategyConfig, refuse_ignored
from lightrft.strategy.protocol import ModelT
from lightrft.strategy.record import RunState, StrategyRecord, bind

NAME = "fsdp"
CARRIES = frozenset({"bf16", "fsdp_cpu_offload", *ranks.ENGINE_FIELDS})


def shape_of_mesh(world_size: int, per_node: int) -> tuple[int, ...]:
    """(shard,), or (replicate, shard) where the ranks fill more than one machine of ``per_node``.

    Raises ``ConfigError`` when they do not fill each.
    """
    if per_node < 1 or (world_size > per_node and world_size % per_node):
        raise ConfigError(
            f"world_size={world_size} is no multiple of num_gpu_per_node={per_node}: every machine has to run as many "
            f"ranks. Start {max(world_size // max(per_node, 1), 1) * max(per_node, 1)}, or pass the true "
            f"num_gpu_per_node to setup_distributed."
        )
    return (world_size,) if world_size <= per_node else (world_size // per_node, per_node)


def set_up(state: RunState, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
    """Meets the other ranks, and lays the mesh over them."""
    if state.is_set_up:
        return
    shape = shape_of_mesh(state.world.world_size, num_gpu_per_node)
    ranks.join_ranks(state, timeout)
    names = ("replicate", "shard")[-len(shape) :]
    state.mesh = init_device_mesh(state.device.type, shape, mesh_dim_names=names)


def prepare_model(state: RunState, model: ModelT, optimizer: Optimizer | None) -> ModelT:
    """The same module, its parameters sharded block by block; the optimizer now holds the shards."""
    ranks.require_set_up(state, "prepare")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return model
    names: list[list[str]] = []
    if optimizer is not None:
        refuse_stepped(optimizer)
        names = names_in_groups(optimizer, model)
        let_go(optimizer)
    if state.config.bf16:
        keep_master_weights(model)
    with filling(state, model) as fill:
        shard(state, model, fill)
    if optimizer is not None:
        repoint(optimizer, names, model)
    note_peers_in_forward(state, model)
    return model


def shard(state: RunState, model: Module, fill: Callable[[Module], None]) -> None:
    """Each repeated block a unit, and what is left another; ``fill`` first gives memory to what has none."""
    precision = MixedPrecisionPolicy()
    if state.config.bf16:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    on_cuda = state.device.type == "cuda"
    offload = CPUOffloadPolicy() if state.config.fsdp_cpu_offload and on_cuda else OffloadPolicy()
    for unit in (*blocks_of(model, speaks=ranks.is_rank_0(state)), model):
        fill(unit)
        fully_shard(unit, mesh=state.mesh, mp_policy=precision, offload_policy=offload)


def apply_update(state: RunState, model: Module, optimizer: Optimizer, rescale: float) -> float:
    """As where everything is whole; what a forward has gathered is let go of first, or the next one would see it."""
    reshard(model)
    return accumulation.apply_update(state, model, optimizer, rescale)


def build(config: StrategyConfig, args: object = None) -> StrategyRecord:
    """The ranks that the launcher started, or one without a launcher; nobody is met before ``setup_distributed``."""
    refuse_ignored(config, NAME, CARRIES)
    world = ranks.world_of_ranks(config)
    ranks.check_engine_groups(config, world)
    run = run_state(config, world, ranks.device_of_rank(world))
    parts = Parts(
        setup_distributed=bind(set_up, run),
        barrier=bind(ranks.wait_for_ranks, run),
        close=bind(ranks.leave_ranks, run),
        collecting=collecting(run),
        prepare_model=prepare_model,
        gradients=evolve(IN_PARAMETERS, apply=apply_update),
        whole_state=SHARDED,
        init_model_context=bind(seeds.init_model_context, run),
        setup_inference_engine=bind(registry.setup_inference_engine, run),
    )
    return composed(NAME, run, config if args is None else args, parts)
