"""A strategy, composed: what all backends share, and the ``Parts`` in which they differ."""

from __future__ import annotations

import torch
from attrs import frozen

from lightrft.ops import accumulation, averaging, checkpointing, data, memory, optimizers, ranks, rollout, seeds
from lightrft.ops.accumulation import IN_PARAMETERS, Accumulating, Gradients
from lightrft.ops.averaging import AverageInto, Averaging, average_tensors
from lightrft.ops.collectives import ALONE, Collecting
from lightrft.ops.models import WholeWeights, named_weights, unwrap_model
from lightrft.ops.preparation import PrepareEach, PrepareModel, PrepareRun
from lightrft.ops.whole_state import IN_PROCESS, WholeState
from lightrft.ops.world import World
from lightrft.strategy.config import StrategyConfig, accumulated_gradient
from lightrft.strategy.protocol import Barrier, Close, InitModelContext, SetupDistributed, SetupInferenceEngine
from lightrft.strategy.record import RunState, StrategyRecord, bind


@frozen(kw_only=True)
class Parts:
    """What a backend brings."""

    setup_distributed: SetupDistributed
    barrier: Barrier
    close: Close
    collecting: Collecting
    prepare_model: PrepareModel
    gradients: Gradients = IN_PARAMETERS
    whole_weights: WholeWeights = named_weights
    average_into: AverageInto = average_tensors
    whole_state: WholeState = IN_PROCESS
    init_model_context: InitModelContext
    setup_inference_engine: SetupInferenceEngine


def parts_alone(run: RunState, *, prepare_model: PrepareModel, setup_inference_engine: SetupInferenceEngine) -> Parts:
    """Those of a backend of one process."""
    return Parts(
        setup_distributed=bind(ranks.set_up_alone, run),
        barrier=bind(ranks.wait_for_nobody, run),
        close=bind(ranks.close_alone, run),
        collecting=ALONE,
        prepare_model=prepare_model,
        init_model_context=bind(seeds.init_whole_model_context, run),
        setup_inference_engine=setup_inference_engine,
    )


def composed(name: str, run: RunState, args: object, parts: Parts) -> StrategyRecord:
    """The record of a backend."""
    accumulating = Accumulating(run, parts.gradients)
    saving = checkpointing.Saving(run, name, parts.whole_state)
    prepare = PrepareEach(run, parts.prepare_model)
    generating = rollout.Generating(run, parts.collecting)
    return StrategyRecord(
        name=name,
        config=run.config,
        args=args,
        world_size=run.world.world_size,
        local_rank=run.world.local_rank,
        device=run.device,
        setup_distributed=parts.setup_distributed,
        is_rank_0=bind(ranks.is_rank_0, run),
        get_rank=bind(ranks.get_rank, run),
        print=bind(ranks.print_on_rank_0, run),
        barrier=parts.barrier,
        close=bind(checkpointing.close, checkpointing.Closing(run, parts.close)),
        all_reduce=parts.collecting.all_reduce,
        all_gather=parts.collecting.all_gather,
        broadcast=parts.collecting.broadcast,
        create_optimizer=bind(optimizers.create_optimizer, run),
        prepare=prepare,
        prepare_models_and_optimizers=PrepareRun(run, prepare),
        backward=bind(accumulation.backward, accumulating),
        optimizer_step=bind(accumulation.optimizer_step, accumulating),
        get_grad_norm=bind(accumulation.get_grad_norm, accumulating),
        unwrap_model=unwrap_model,
        init_model_context=parts.init_model_context,
        setup_dataloader=bind(data.setup_dataloader, run),
        moving_average=bind(averaging.moving_average, Averaging(run, parts.average_into)),
        save_ckpt=bind(checkpointing.save_ckpt, saving),
        load_ckpt=bind(checkpointing.load_ckpt, saving),
        save_model=bind(checkpointing.save_model, saving),
        load_model=bind(checkpointing.load_model, saving),
        maybe_offload_optimizer=bind(optimizers.maybe_offload_optimizer, run),
        maybe_load_optimizer=bind(optimizers.maybe_load_optimizer, run),
        offload_model=bind(memory.offload_model, run),
        reload_model=bind(memory.reload_model, run),
        report_memory=bind(memory.report_memory, run),
        setup_inference_engine=parts.setup_inference_engine,
        update_engine_weights=bind(
            rollout.update_engine_weights, rollout.Sending(run, parts.whole_weights, parts.collecting)
        ),
        maybe_sleep_inference_engine=bind(rollout.maybe_sleep_inference_engine, run),
        wakeup_inference_engine=bind(rollout.wakeup_inference_engine, run),
        engine_generate_local=bind(rollout.engine_generate_local, run),
        gather_and_generate=bind(rollout.gather_and_generate, generating),
    )


def run_state(config: StrategyConfig, world: World, device: torch.device) -> RunState:
    """The state of a run that begins. Raises ``ConfigError`` when its batch sizes do not fit (C5)."""
    return RunState(
        config=config, world=world, device=device, accumulated_gradient=accumulated_gradient(config, world.world_size)
    )
