"""A strategy of one process, composed: what ``local`` and ``fake`` share."""

from __future__ import annotations

import torch

from lightrft.ops import accumulation, checkpointing, data, memory, optimizers, ranks, rollout, seeds
from lightrft.ops.clipping import clip_gradients
from lightrft.ops.collectives import AllGatherAlone, AllReduceAlone, BroadcastAlone
from lightrft.ops.models import unwrap_model
from lightrft.ops.preparation import PrepareEach, PrepareModel, PrepareRun
from lightrft.ops.world import World
from lightrft.strategy.config import StrategyConfig, accumulated_gradient
from lightrft.strategy.protocol import SetupInferenceEngine
from lightrft.strategy.record import RunState, StrategyRecord, bind


def one_process(
    name: str,
    run: RunState,
    args: object,
    *,
    prepare_model: PrepareModel,
    setup_inference_engine: SetupInferenceEngine,
) -> StrategyRecord:
    """The record of a backend that runs alone. What differs between such backends is passed in."""
    stepping = accumulation.Stepping(run, clip_gradients)
    saving = checkpointing.Saving(run, name)
    prepare = PrepareEach(run, prepare_model)
    return StrategyRecord(
        name=name,
        config=run.config,
        args=args,
        world_size=run.world.world_size,
        local_rank=run.world.local_rank,
        device=run.device,
        setup_distributed=bind(ranks.set_up_alone, run),
        is_rank_0=bind(ranks.is_rank_0, run),
        get_rank=bind(ranks.get_rank, run),
        print=bind(ranks.print_on_rank_0, run),
        barrier=bind(ranks.wait_for_nobody, run),
        close=bind(ranks.close_alone, run),
        all_reduce=AllReduceAlone(),
        all_gather=AllGatherAlone(),
        broadcast=BroadcastAlone(),
        create_optimizer=bind(optimizers.create_optimizer, run),
        prepare=prepare,
        prepare_models_and_optimizers=PrepareRun(run, prepare),
        backward=bind(accumulation.backward, run),
        optimizer_step=bind(accumulation.optimizer_step, stepping),
        get_grad_norm=bind(accumulation.get_grad_norm, run),
        unwrap_model=unwrap_model,
        init_model_context=bind(seeds.init_model_context, run),
        setup_dataloader=bind(data.setup_dataloader, run),
        moving_average=bind(accumulation.moving_average, run),
        save_ckpt=bind(checkpointing.save_ckpt, saving),
        load_ckpt=bind(checkpointing.load_ckpt, saving),
        save_model=bind(checkpointing.save_model, run),
        load_model=bind(checkpointing.load_model, run),
        maybe_offload_optimizer=bind(optimizers.maybe_offload_optimizer, run),
        maybe_load_optimizer=bind(optimizers.maybe_load_optimizer, run),
        offload_model=bind(memory.offload_model, run),
        reload_model=bind(memory.reload_model, run),
        report_memory=bind(memory.report_memory, run),
        setup_inference_engine=setup_inference_engine,
        update_engine_weights=bind(rollout.update_engine_weights, run),
        maybe_sleep_inference_engine=bind(rollout.maybe_sleep_inference_engine, run),
        wakeup_inference_engine=bind(rollout.wakeup_inference_engine, run),
        engine_generate_local=bind(rollout.engine_generate_local, run),
        gather_and_generate=bind(rollout.gather_and_generate, run),
    )


def run_alone(config: StrategyConfig, device: torch.device, local_rank: int = 0) -> RunState:
    """The state of a run of one process. Raises ``ConfigError`` when its batch sizes do not fit (C5)."""
    return RunState(
        config=config,
        world=World(rank=0, world_size=1, local_rank=local_rank),
        device=device,
        accumulated_gradient=accumulated_gradient(config, 1),
    )
