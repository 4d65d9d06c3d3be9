"""What a backend is composed of, in one place: a third party imports from here and from nowhere below.

- The frame: ``composed`` makes the strategy out of ``Parts``; ``run_state`` is what changes while it runs; ``bind`` gives a
  function its state.
- The configuration: ``refuse_ignored`` refuses fields that a backend does not carry out (C7), ``ENGINE_FIELDS`` are those of
  engines, which are carried out for it.
- Ranks: ``world_of_ranks`` to ``leave_ranks`` find, meet and leave the others; ``collecting`` are the collectives.
- Models: where they are placed, how they compute in bfloat16, what an actor wrapper holds.
- Gradients: ``IN_PARAMETERS`` are those that lie in ``.grad``; ``attrs.evolve`` swaps what differs.
"""

from __future__ import annotations

from lightrft.engines.registry import setup_inference_engine
from lightrft.ops.accumulation import IN_PARAMETERS, Gradients
from lightrft.ops.collectives_of_ranks import collecting
from lightrft.ops.composition import Parts, composed, parts_alone, run_state
from lightrft.ops.models import compute_in_bf16, keep_master_weights, place, unwrap_model
from lightrft.ops.peers import naming_peers
from lightrft.ops.ranks import (
    ENGINE_FIELDS,
    check_engine_groups,
    device_of_rank,
    join_ranks,
    leave_ranks,
    require_set_up,
    set_up_ranks,
    wait_for_ranks,
    world_of_ranks,
)
from lightrft.ops.seeds import init_whole_model_context
from lightrft.strategy.config import StrategyConfig, refuse_ignored
from lightrft.strategy.protocol import ModelT
from lightrft.strategy.record import RunState, StrategyRecord, bind

__all__ = [
    "ENGINE_FIELDS",
    "IN_PARAMETERS",
    "Gradients",
    "ModelT",
    "Parts",
    "RunState",
    "StrategyConfig",
    "StrategyRecord",
    "bind",
    "check_engine_groups",
    "collecting",
    "composed",
    "compute_in_bf16",
    "device_of_rank",
    "init_whole_model_context",
    "join_ranks",
    "keep_master_weights",
    "leave_ranks",
    "naming_peers",
    "parts_alone",
    "place",
    "refuse_ignored",
    "require_set_up",
    "run_state",
    "set_up_ranks",
    "setup_inference_engine",
    "unwrap_model",
    "wait_for_ranks",
    "world_of_ranks",
]
