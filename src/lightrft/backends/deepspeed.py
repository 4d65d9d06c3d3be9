"""``deepspeed``: ZeRO stages 0 to 3 through ``deepspeed.initialize``.

What DeepSpeed would decide by counting (when to reduce, when to step) is told to it: windows are counted in
``lightrft.ops.accumulation``, as for every backend. What is left to it: sharding, reduction, clipping and the update.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightrft.engines import registry
from lightrft.errors import missing, unsupported
from lightrft.ops import accumulation, ranks, seeds
from lightrft.ops.accumulation import Gradients, trained_model, window_of
from lightrft.ops.averaging import average_tensors
from lightrft.ops.collectives_of_ranks import collecting
from lightrft.ops.composition import Parts, composed, run_state
from lightrft.ops.models import compute_in_bf16, keep_master_weights, place, unwrap_model
from lightrft.ops.peers import naming_peers, note_peers_in_forward
from lightrft.ops.sharding import names_in_groups, refuse_stepped
from lightrft.ops.whole_state import (
    WholeState,
    optimizer_of,
    put_buffers,
    put_hyperparameters,
    put_sharded,
    skeleton,
    take_sharded,
)
from lightrft.ops.world import local_rank_variable
from lightrft.strategy.config import StrategyConfig, refuse_ignored
from lightrft.strategy.protocol import ModelT
from lightrft.strategy.record import RunState, StrategyRecord, bind

if TYPE_CHECKING:
    import deepspeed

NAME = "deepspeed"
CARRIES = frozenset(
    {"bf16", "zero_stage", "adam_offload", "zpg", "grad_accum_dtype", "overlap_comm", "enable_engine_sleep"}
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


def is_engine(model: Module) -> TypeGuard[deepspeed.DeepSpeedEngine]:
    """Whether DeepSpeed drives it."""
    return hasattr(type(model), "zero_optimization_stage")


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
    with local_rank_variable(state.world):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings(state.config, state.accumulated_gradient, parameters)
        )
    if stage in (0, 3):
        # Stage 0 reduces when it is told, stage 3 after each backward anyway.
        engine.set_gradient_accumulation_boundary(stage == 3)
    return engine


def take_bf16_inputs(model: Module) -> None:
    """Parameters are bfloat16 there, and DeepSpeed leaves inputs as they are."""

    def cast_inputs(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(in_bf16, args)), {name: in_bf16(value) for name, value in kwargs.items()}

    model.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def in_bf16(value: object) -> object:
    """A floating-point tensor in bfloat16; anything else as it is."""
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


# ------------------------------------------------------------------------------------------------------------ gradients


def zero_of(engine: deepspeed.DeepSpeedEngine) -> deepspeed.ZeroOptimizer | None:
    """The optimizer of stages 1 to 3, which keeps gradients out of ``.grad``; None at stage 0."""
    return None if engine.zero_optimization_stage() == 0 else cast("deepspeed.ZeroOptimizer", engine.optimizer)


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


def mark_window(state: RunState, optimizer: Optimizer) -> None:
    """An empty parameter with a gradient, in the optimizer's first group for as long as a window is open.

    The caller's ``optimizer.zero_grad()`` takes the gradient away: that is how it shows where gradients are kept by
    DeepSpeed and not by the optimizer's parameters.
    """
    unmark_window(state, optimizer)
    marker = Parameter(torch.empty(0))
    marker.grad = torch.empty(0)
    optimizer.param_groups[0]["params"].append(marker)
    state.window_markers[optimizer] = marker


def unmark_window(state: RunState, optimizer: Optimizer) -> None:
    """Takes it out again."""
    marker = state.window_markers.pop(optimizer, None)
    if marker is not None:
        held = optimizer.param_groups[0]["params"]
        held[:] = [parameter for parameter in held if parameter is not marker]


def were_dropped(state: RunState, model: Module, optimizer: Optimizer) -> bool:
    """Whether the caller's ``zero_grad()`` was called since the window began."""
    engine = engine_of(state, model)
    if zero_of(engine) is None:
        return accumulation.no_gradients(state, engine, optimizer)
    marker = state.window_markers.get(optimizer)
    return marker is not None and marker.grad is None


def drop(zero: deepspeed.ZeroOptimizer) -> None:
    """Begins a window with nothing: what an unfinished one has accumulated goes, and what an earlier one left where this
    one may have no gradient at all. DeepSpeed itself only writes over what the first backward uses."""
    zero.zero_grad(set_to_none=True)
    stage_3 = hasattr(zero, "grad_partitions_flat_buffer")
    if stage_3:
        zero.grad_partitions_flat_buffer.zero_()
    else:
        zero._release_preflattened_grad_buffers()
        for group in zero.averaged_gradients:
            zero.averaged_gradients[group] = None
        for group in zero.all_grad_tensors:
            zero.all_grad_tensors[group] = None
    if not (zero.offload_optimizer if stage_3 else zero.cpu_offload):
        return
    zero.reset_cpu_buffers()
    if not stage_3:
        zero.micro_step_id = -1
        for accumulated in zero.accumulated_grads_in_cpu.values():
            accumulated.zero_()
    for partition in partitions_of(zero):
        if partition.grad is None:  # a buffer for good, which the caller's zero_grad() took for a gradient
            partition.grad = torch.zeros_like(partition)
        partition.grad.zero_()


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


# ------------------------------------------------------------------------------------------------------ whole parameters


def is_partitioned(parameter: Tensor) -> bool:
    """Whether stage 3 has cut it."""
    return hasattr(parameter, "ds_id")


def whole_weights(model: Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that forward uses, gathered one by one at stage 3."""
    import deepspeed

    for name, parameter in unwrap_model(model).named_parameters():
        if is_partitioned(parameter):
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()
        else:
            yield name, parameter.detach()


def average_into(average: Tensor, parameter: Tensor, weight: float) -> None:
    """With the fp32 parameter, where there is one beside that of forward."""
    import deepspeed

    master = deepspeed.utils.safe_get_full_fp32_param(parameter)
    source = parameter if master is None else master
    if is_partitioned(average):
        with deepspeed.zero.GatheredParameters([average], modifier_rank=0):
            average_tensors(average, source, weight)
    else:
        average_tensors(average, source, weight)


# ---------------------------------------------------------------------------------------------------------- whole state


def gather(parameter: Tensor) -> Tensor:
    """A parameter or buffer, whole: the fp32 one, where there is one beside that of forward."""
    import deepspeed

    master = deepspeed.utils.safe_get_full_fp32_param(parameter)
    if master is not None:
        return master
    if not is_partitioned(parameter):
        return parameter
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def take_state(
    state: RunState, model: Module, optimizer: Optimizer | None, keep: bool = True
) -> tuple[Module, Optimizer | None]:
    """Gathers partition by partition."""
    import deepspeed

    plain = unwrap_model(model)
    engine = state.engines.get(plain)
    zero = zero_of(engine) if engine is not None and is_engine(engine) else None
    if zero is None:
        return take_sharded(state, plain, optimizer, keep)
    made = skeleton(plain, gather, keep)
    if optimizer is None:
        return made, None
    groups = trained_model(state, model).group_names
    entries: dict[str, dict[str, object]] = {}
    first = next(iter(optimizer.state.values()), None)
    if first:
        relink(zero)
    for name in (name for names in groups for name in names) if first else ():
        parameter = plain.get_parameter(name)
        entry: dict[str, object] = {}
        for key, value in (first or {}).items():
            if is_of_elements(value):
                value = deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
            entry[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
        entries[name] = entry if keep else {}
    return made, optimizer_of(made, optimizer, groups, entries)


def is_of_elements(value: object) -> bool:
    """Whether an entry of the optimizer's state has a value for each element, and not one for all, as a step count."""
    return isinstance(value, Tensor) and value.ndim > 0


def put_state(
    state: RunState,
    model: Module,
    optimizer: Optimizer | None,
    whole_model: Module,
    whole_optimizer: Optimizer | None,
) -> None:
    """Each rank takes its partitions of what all have."""
    import deepspeed

    plain = unwrap_model(model)
    engine = state.engines.get(plain)
    zero = zero_of(engine) if engine is not None and is_engine(engine) else None
    if zero is None:
        put_sharded(state, plain, optimizer, whole_model, whole_optimizer)
        return
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            value = whole_model.get_parameter(name).to(state.device)
            deepspeed.utils.safe_set_full_fp32_param(parameter, value.float())
            if is_partitioned(parameter):
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.copy_(value)
            else:
                parameter.copy_(value)
        put_buffers(plain, whole_model)
        if optimizer is None or whole_optimizer is None:
            return
        put_hyperparameters(optimizer, whole_optimizer)
        optimizer.state.clear()
        first = next(iter(whole_optimizer.state.values()), None)
        if not first:
            return
        for partition in partitions_of(zero):
            optimizer.state[partition] = {
                key: torch.zeros_like(partition) if is_of_elements(value) else copy.deepcopy(value)
                for key, value in first.items()
            }
        relink(zero)
        for name, parameter in plain.named_parameters():
            entry = whole_optimizer.state.get(whole_model.get_parameter(name)) or {}
            for key, value in entry.items():
                if isinstance(value, Tensor) and is_of_elements(value):
                    deepspeed.utils.safe_set_full_optimizer_state(parameter, value.to(state.device), key)


def partitions_of(zero: deepspeed.ZeroOptimizer) -> list[Parameter]:
    """This rank's flat fp32 partitions, as the optimizer's state is keyed by them."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return zero.fp32_partitioned_groups_flat
    return zero.single_partition_of_fp32_groups


def relink(zero: deepspeed.ZeroOptimizer) -> None:
    """Stages 1 and 2 reach a parameter's state through views, which have to be made for new state."""
    if hasattr(zero, "single_partition_of_fp32_groups"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def build(config: StrategyConfig, args: object = None) -> StrategyRecord:
    """The ranks that the launcher started, or one without a launcher; nobody is met before ``setup_distributed``."""
    refuse_ignored(config, NAME, CARRIES)
    world = ranks.world_of_ranks(config)
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
        whole_state=WholeState(take_state, put_state),
        init_model_context=bind(init_model_context, run),
        setup_inference_engine=bind(registry.setup_inference_engine, run),
    )
    return composed(NAME, run, config if args is None else args, parts)
