"""``deepspeed``: ZeRO stages 0 to 3 through ``deepspeed.initialize``.

What DeepSpeed would decide by counting (when to reduce, when to step) is told to it: windows are counted in
``lightrft.ops.accumulation``, as for every backend. What is left to it: sharding, reduction, clipping and the update.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightrft.engines import registry
from lightrft.errors import missing, unsupported
from lightrft.ops import accumulation, ranks, seeds
from lightrft.ops.accumulation import Gradients, trained_model, window_of
from lightrft.ops.collectives_of_ranks import collecting
from lightrft.ops.composition import Parts, composed, run_state
from lightrft.ops.models import compute_in_bf16, keep_master_weights, place, unwrap_model
from lightrft.ops.peers import naming_peers, note_peers_in_forward
from lightrft.ops.sharding import names_in_groups, refuse_stepped
from lightrft.ops.whole_state import WholeState
from lightrft.ops.world import kept_environment, launcher_set_local_rank
from lightrft.ops.zero import (
    average_into,
    drop,
    is_engine,
    mark_window,
    outline_state,
    put_state,
    unmark_window,
    whole_weights,
    zero_of,
)
from lightrft.strategy.config import StrategyConfig, refuse_ignored
from lightrft.strategy.protocol import ModelT
from lightrft.strategy.record import RunState, StrategyRecord, bind

if TYPE_CHECKING:
    import deepspeed

NAME = "deepspeed"
CARRIES = frozenset(
    {"bf16", "zero_stage", "adam_offload", "zpg", "grad_accum_dtype", "overlap_comm", *ranks.ENGINE_FIELDS}
)

# ------------------------------------------------------------------------------------------------------ configuration


def check_combination(config: StrategyConfig, world_size: int) -> None:
    """Refuses what DeepSpeed would take and not carry out (C7)."""
    stage = config.zero_stage
    if config.overlap_comm and stage < 2:
        raise unsupported(NAME, f"overlap_comm=True at zero_stage={stage}", "use zero_stage 2 or 3")
    if config.zpg > 1 and stage < 3:
        raise unsupported(NAME, f"zpg={config.zpg} at zero_stage={stage}", "use zero_stage=3, or zpg=1")
    if config.zpg > 1 and world_size % config.zpg:
        raise unsupported(NAME, f"zpg={config.zpg} over {world_size} ranks", "use a divisor of the number of ranks")
    if config.adam_offload and stage == 0:
        raise unsupported(NAME, "adam_offload=True at zero_stage=0", "use zero_stage 1, 2 or 3")
    if config.grad_accum_dtype not in (None, "fp32") and not keeps_bf16(config):
        raise unsupported(
            NAME,
            f"grad_accum_dtype={config.grad_accum_dtype!r} with bf16={config.bf16} at zero_stage={stage}",
            "gradients are fp32 there: leave it out, or use bf16 at zero_stage 2 or 3",
        )


def keeps_bf16(config: StrategyConfig) -> bool:
    """Whether DeepSpeed itself keeps bfloat16 parameters beside fp32 ones.

    It cannot at stage 0 with gradients in fp32, and at stage 1 its optimizer for that neither skips updates nor ends
    windows early: there forward runs under autocast on fp32 parameters, as on ``local``.
    """
    return config.bf16 and config.zero_stage >= 2


def settings(config: StrategyConfig, accumulation_steps: int, parameters: int) -> dict[str, object]:
    """DeepSpeed's own configuration, made anew for each model: it writes into it.

    In bf16 gradients are reduced, and unless told otherwise accumulated, in fp32 (T10).
    """
    stage = config.zero_stage
    zero: dict[str, object] = {
        "stage": stage,
        "overlap_comm": config.overlap_comm,
        "zero_hpz_partition_size": config.zpg,
        # The buffer for reduced gradients has this many elements from the start.
        "reduce_bucket_size": min(500_000_000, max(parameters, 1)),
    }
    if config.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    made: dict[str, object] = {
        "train_micro_batch_size_per_gpu": config.micro_train_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": config.max_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if stage in (1, 2):
        made["managed_gradient_accumulation"] = False  # each engine.step() is the end of a window
    if keeps_bf16(config):
        made["bf16"] = {"enabled": True, "check_grad_overflow": True}
        made["communication_data_type"] = "fp32"
        made["data_types"] = {"grad_accum_dtype": config.grad_accum_dtype or "fp32"}
    return made


# ------------------------------------------------------------------------------------------------------------- set-up


def set_up(state: RunState, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
    """Meets the other ranks; DeepSpeed is told of the process group that is there."""
    if state.is_set_up:
        return
    on_cpu = state.device.type == "cpu"
    import_quietly()
    import deepspeed

    if on_cpu:
        # An extension for reductions in shared memory, which would be compiled for a minute at the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ranks.join_ranks(state, timeout)
    deepspeed.init_distributed(dist_backend="gloo" if on_cpu else "nccl", auto_mpi_discovery=False, verbose=False)


def import_quietly() -> None:
    """Imports DeepSpeed, which reports on the machine while it is imported, and later on each step it takes."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with kept_environment():
            import deepspeed  # noqa: F401
    except ImportError as error:
        raise missing("deepspeed", "deepspeed", "backend 'deepspeed'") from error
    finally:
        logging.disable(before)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


@contextmanager
def init_model_context(state: RunState, meta_init: bool = False) -> Iterator[None]:
    """With ``meta_init`` at stage 3, Hugging Face models are made in pieces: no rank ever holds a whole one."""
    if not meta_init:
        with seeds.init_model_context(state):
            yield
        return
    if state.config.zero_stage < 3:
        raise unsupported(NAME, "init_model_context(meta_init=True) below zero_stage=3", "use meta_init=False")
    ranks.require_set_up(state, "init_model_context")
    try:
        from transformers.integrations.deepspeed import HfDeepSpeedConfig
    except ImportError as error:
        raise missing("transformers", "train", "init_model_context(meta_init=True)") from error
    with seeds.init_model_context(state):
        # transformers keeps a weak reference: it is in force as long as this one lives.
        in_force = HfDeepSpeedConfig(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
            settings(state.config, state.accumulated_gradient, 0)
        )
        yield
        del in_force


# ------------------------------------------------------------------------------------------------------------- engines


def engine_of(state: RunState, model: Module) -> deepspeed.DeepSpeedEngine:
    """The engine that ``prepare`` made of a model, given either of the two."""
    engine = model if is_engine(model) else state.engines.get(unwrap_model(model))
    if engine is None or not is_engine(engine):
        raise ValueError(
            "backend 'deepspeed' trains what strategy.prepare((model, optimizer)) returned: this model was not "
            "prepared with an optimizer."
        )
    return engine


def prepare_model(state: RunState, model: ModelT, optimizer: Optimizer | None) -> ModelT:
    """DeepSpeed's engine around a model that is trained; the optimizer stays the caller's, its parameters in partitions.

    A model without an optimizer is only evaluated: it stays whole, except at stage 3, where an engine shards it.
    """
    ranks.require_set_up(state, "prepare")
    if is_engine(model):
        return cast("ModelT", model)
    known = state.engines.get(unwrap_model(model))
    if known is not None:
        return cast("ModelT", known)
    if optimizer is None and (state.config.zero_stage < 3 or model.training):
        place(model, state.device)
        if state.config.bf16 and not model.training and model not in state.prepared:
            compute_in_bf16(model, state.device)
        state.prepared.add(model)
        return model
    if optimizer is not None:
        refuse_stepped(optimizer)
        trained_model(state, model).group_names = names_in_groups(optimizer, unwrap_model(model))
    engine = started(state, model, optimizer)
    state.engines[unwrap_model(model)] = engine
    note_peers_in_forward(state, engine)
    if state.config.zero_stage == 3 and not launcher_set_local_rank():
        set_local_rank_in_forward(state, engine)
    return cast("ModelT", engine)  # an engine passes on what it does not know to the model


def started(state: RunState, model: Module, optimizer: Optimizer | None) -> deepspeed.DeepSpeedEngine:
    """An engine."""
    import deepspeed

    stage = state.config.zero_stage
    if state.config.bf16:
        keep_master_weights(model)
        if keeps_bf16(state.config):
            take_bf16_inputs(model)
        else:
            compute_in_bf16(model, state.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with kept_environment(LOCAL_RANK=str(state.world.local_rank)):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings(state.config, state.accumulated_gradient, parameters)
        )
    if stage in (0, 3):
        # Stage 0 reduces when it is told, stage 3 after each backward anyway.
        engine.set_gradient_accumulation_boundary(stage == 3)
    return engine


def set_local_rank_in_forward(state: RunState, engine: Module) -> None:
    """At stage 3 DeepSpeed reads ``LOCAL_RANK`` in forward: without a launcher, or under Slurm, nobody has set it."""
    entered: list[AbstractContextManager[None]] = []

    def enter(module: Module, args: object) -> None:
        entered.append(kept_environment(LOCAL_RANK=str(state.world.local_rank)))
        entered[-1].__enter__()

    def leave(module: Module, args: object, output: object) -> None:
        entered.pop().__exit__(None, None, None)

    engine.register_forward_pre_hook(enter)
    engine.register_forward_hook(leave, always_call=True)


def take_bf16_inputs(model: Module) -> None:
    """Parameters are bfloat16 there, and DeepSpeed leaves inputs as they are."""

    def cast_inputs(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(in_bf16, args)), {name: in_bf16(value) for name, value in kwargs.items()}

    model.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def in_bf16(value: object) -> object:
    """A floating-point tensor in bfloat16; anything else as it is."""
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


# ------------------------------------------------------------------------------------------------------------ gradients


def add_gradient(state: RunState, loss: Tensor, model: Module, optimizer: Optimizer) -> None:
    """DeepSpeed's backward, its own division left out."""
    engine = engine_of(state, model)
    zero, window = zero_of(engine), window_of(state, optimizer)
    if zero is not None:
        if window.micro_batches == 0:
            drop(zero)
            mark_window(state, optimizer)
        if engine.zero_optimization_stage() == 3:
            # It counts forwards to know which backward begins a window, and two forwards may come before one backward.
            zero.micro_step_id = window.micro_batches
    with naming_peers(state, "backward"):
        engine.backward(loss, scale_wrt_gas=False)


def were_dropped(state: RunState, model: Module, optimizer: Optimizer) -> bool:
    """Whether the caller's ``zero_grad()`` was called since the window began."""
    engine = engine_of(state, model)
    if zero_of(engine) is None:
        return accumulation.no_gradients(state, engine, optimizer)
    marker = state.window_markers.get(optimizer)
    return marker is not None and marker.grad is None


def apply_update(state: RunState, model: Module, optimizer: Optimizer, rescale: float) -> float:
    """Stage 0: reduces, then as every backend. Stages 1 to 3: DeepSpeed's own step, which skips non-finite norms."""
    engine = engine_of(state, model)
    zero = zero_of(engine)
    with naming_peers(state, "optimizer_step"):
        if zero is None:
            engine.set_gradient_accumulation_boundary(True)
            engine.allreduce_gradients()
            engine.set_gradient_accumulation_boundary(False)
            return accumulation.apply_update(state, engine.module, optimizer, rescale)
        unmark_window(state, optimizer)
        zero.override_loss_scale(1.0 / rescale)  # gradients are divided by it
        engine.step()
        zero.override_loss_scale(1.0)
    norm = engine.get_global_grad_norm()
    return math.inf if zero.overflow or norm is None else float(norm)


def norm_now(state: RunState, model: Module) -> float | None:
    """Stages 1 to 3 know the norm only when they step."""
    engine = engine_of(state, model)
    if zero_of(engine) is None:
        return accumulation.norm_now(state, engine)
    optimizer = trained_model(state, model).optimizer
    if optimizer is not None and window_of(state, optimizer).micro_batches:
        raise unsupported(
            NAME,
            f"get_grad_norm in the middle of a window at zero_stage={state.config.zero_stage}",
            "ask after an applied update, or read StepOutcome.grad_norm",
        )
    return None


def build(config: StrategyConfig, args: object = None) -> StrategyRecord:
    """The ranks that the launcher started, or one without a launcher; nobody is met before ``setup_distributed``."""
    refuse_ignored(config, NAME, CARRIES)
    world = ranks.world_of_ranks(config)
    ranks.check_engine_groups(config, world)
    check_combination(config, world.world_size)
    run = run_state(config, world, ranks.device_of_rank(world))
    parts = Parts(
        setup_distributed=bind(set_up, run),
        barrier=bind(ranks.wait_for_ranks, run),
        close=bind(ranks.leave_ranks, run),
        collecting=collecting(run),
        prepare_model=prepare_model,
        gradients=Gradients(add_gradient, were_dropped, apply_update, norm_now),
        whole_weights=whole_weights,
        average_into=average_into,
        whole_state=WholeState(outline_state, put_state),
        init_model_context=bind(init_model_context, run),
        setup_inference_engine=bind(registry.setup_inference_engine, run),
    )
    return composed(NAME, run, config if args is None else args, parts)
