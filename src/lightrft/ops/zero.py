"""ZeRO: what DeepSpeed keeps of gradients, parameters and optimizer state at stages 1 to 3, and how to get at it.

DeepSpeed's public functions are used where there are any. Where its own code writes only over what a backward pass uses,
a gradient of an earlier window would come back in a later one: :func:`drop` is what prevents it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import pad
from torch.optim import Optimizer

from lightrft.ops.accumulation import trained_model
from lightrft.ops.averaging import average_tensors
from lightrft.ops.models import unwrap_model
from lightrft.ops.whole_state import (
    Outline,
    Sources,
    optimizer_of,
    outline_sharded,
    put_buffers,
    put_hyperparameters,
    put_sharded,
    skeleton,
)
from lightrft.strategy.record import RunState, bind

if TYPE_CHECKING:
    import deepspeed


def is_engine(model: Module) -> TypeGuard[deepspeed.DeepSpeedEngine]:
    """Whether DeepSpeed drives it."""
    return hasattr(type(model), "zero_optimization_stage")


def zero_of(engine: deepspeed.DeepSpeedEngine) -> deepspeed.ZeroOptimizer | None:
    """The optimizer of stages 1 to 3, which keeps gradients out of ``.grad``; None at stage 0."""
    return None if engine.zero_optimization_stage() == 0 else cast("deepspeed.ZeroOptimizer", engine.optimizer)


# ------------------------------------------------------------------------------------------------------------- windows


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


def has_master(tensor: Tensor) -> bool:
    """Whether there is an fp32 parameter beside that of forward: there is of what an optimizer trains.

    Stage 3 also cuts models that are only evaluated, which have none: DeepSpeed's own functions fail with those.
    """
    return tensor.requires_grad and hasattr(tensor, "_z3_optimizer" if is_partitioned(tensor) else "_hp_mapping")


def whole_parameter(parameter: Tensor) -> Tensor:
    """A parameter or buffer, whole: the fp32 one, where there is one beside that of forward."""
    import deepspeed

    master = deepspeed.utils.safe_get_full_fp32_param(parameter) if has_master(parameter) else None
    if master is not None:
        return master
    if not is_partitioned(parameter):
        return parameter
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def average_into(average: Tensor, parameter: Tensor, weight: float) -> None:
    """With the fp32 parameter, where there is one beside that of forward."""
    import deepspeed

    source = whole_parameter(parameter)
    if is_partitioned(average):
        with deepspeed.zero.GatheredParameters([average], modifier_rank=0):
            average_tensors(average, source, weight)
    else:
        average_tensors(average, source, weight)


# ---------------------------------------------------------------------------------------------------------- whole state


def form_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """The shape of the whole, and the dtype of the parameter that is trained: fp32, beside that of forward."""
    shape = torch.Size(getattr(tensor, "ds_shape", tensor.shape))
    return shape, torch.float32 if has_master(tensor) else tensor.dtype


def engine_in(state: RunState, model: Module) -> deepspeed.DeepSpeedEngine | None:
    """The engine that drives a model, if one does."""
    engine = state.engines.get(unwrap_model(model))
    return engine if engine is not None and is_engine(engine) else None


def zero_in(state: RunState, model: Module) -> deepspeed.ZeroOptimizer | None:
    """The optimizer of stages 1 to 3 that holds a model's state, if one does."""
    engine = engine_in(state, model)
    held = None if engine is None else zero_of(engine)
    return held if hasattr(held, "override_loss_scale") else None


def outline_state(state: RunState, model: Module, optimizer: Optimizer | None) -> Outline:
    """Partitions are gathered parameter by parameter as they are read."""
    plain, zero = unwrap_model(model), zero_in(state, model)
    if zero is None and not any(map(is_partitioned, plain.parameters())):
        return outline_sharded(state, plain, optimizer)
    sources = Sources()
    made = skeleton(plain, sources, form_of, whole_parameter)
    parameters = dict(made.named_parameters())
    if optimizer is None or zero is None:
        return Outline(made, None, sources.read, parameters)
    groups = trained_model(state, model).group_names
    first = next(iter(optimizer.state.values()), None)
    entries: dict[str, dict[str, object]] = {}
    if first:
        relink(zero)
        for name in (name for group in groups for name in group):
            parameter = plain.get_parameter(name)
            entries[name] = {
                key: sources.placeholder(form_of(parameter)[0], value.dtype, bind(moment, (parameter, key)))
                if isinstance(value, Tensor) and is_of_elements(value)
                else copy.deepcopy(value)
                for key, value in first.items()
            }
    return Outline(made, optimizer_of(parameters, optimizer, groups, entries), sources.read, parameters)


def moment(given: tuple[Parameter, str]) -> Tensor:
    """A parameter's entry of the optimizer's state, whole."""
    import deepspeed

    value = deepspeed.utils.safe_get_full_optimizer_state(*given)
    assert value is not None
    return value


def is_of_elements(value: object) -> bool:
    """Whether an entry of the optimizer's state has a value for each element, and not one for all, as a step count."""
    return isinstance(value, Tensor) and value.ndim > 0


def put_state(
    state: RunState, model: Module, optimizer: Optimizer | None, outline: Outline, with_optimizer: bool
) -> None:
    """Each rank takes its partitions of what all have."""
    import deepspeed

    plain, zero, loaded = unwrap_model(model), zero_in(state, model), outline.optimizer
    if zero is None and not any(map(is_partitioned, plain.parameters())):
        put_sharded(state, plain, optimizer, outline, with_optimizer)
        return
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            value = outline.model.get_parameter(name).detach()
            if value.is_meta:
                continue
            value = value.to(state.device)
            if zero is not None:
                put_elements(state, parameter, value.float())
            if is_partitioned(parameter):
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.copy_(value)
            else:
                parameter.copy_(value)
        put_buffers(plain, outline)
        if optimizer is None or loaded is None or zero is None or not with_optimizer:
            return
        put_hyperparameters(optimizer, loaded)
        optimizer.state.clear()
        first = next(iter(loaded.state.values()), None)
        if not first:
            return
        for partition in partitions_of(zero):
            optimizer.state[partition] = {
                key: torch.zeros_like(partition) if is_of_elements(value) else copy.deepcopy(value)
                for key, value in first.items()
            }
        relink(zero)
        for name, parameter in plain.named_parameters():
            for key, value in (loaded.state.get(outline.parameters[name]) or {}).items():
                if isinstance(value, Tensor) and is_of_elements(value):
                    put_elements(state, parameter, value.to(state.device), key)


def put_elements(state: RunState, parameter: Tensor, value: Tensor, key: str | None = None) -> None:
    """A value for each element of a parameter: in fp32, or with ``key`` an entry of the optimizer's state.

    At stage 3 this rank's piece, the last one padded: DeepSpeed's functions for the whole fail with a padded one.
    """
    from deepspeed import utils

    if not is_partitioned(parameter):
        if key is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)
    elif parameter.requires_grad:
        length = -(-value.numel() // state.world.world_size)
        padded = pad(value.reshape(-1), (0, length * state.world.world_size - value.numel()))
        piece = padded.narrow(0, length * state.world.rank, length)
        if key is None:
            utils.safe_set_local_fp32_param(parameter, piece)
        else:
            utils.safe_set_local_optimizer_state(parameter, piece, key)


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
