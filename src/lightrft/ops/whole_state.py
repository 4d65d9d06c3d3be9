"""The whole state of a model and its optimizer, where a process holds only parts: out for a checkpoint, and back in.

A checkpoint is written from, and read into, a *skeleton*: modules with the names, parameters and buffers of the model and
nothing else, whole and on the CPU, and a copy of the optimizer that holds the skeleton's parameters. So every backend
writes the same files, and any of them reads what another wrote.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightrft.ops.clipping import local_part
from lightrft.ops.models import reshard, unwrap_model, whole
from lightrft.ops.sharding import names_in_groups
from lightrft.strategy.record import RunState


class TakeState(Protocol):
    """Model and optimizer as whole ones. All ranks call it; with ``keep`` False this one's result holds no memory."""

    def __call__(
        self, state: RunState, model: Module, optimizer: Optimizer | None, keep: bool = True
    ) -> tuple[Module, Optimizer | None]: ...


class PutState(Protocol):
    """The values of whole ones, the same on every rank, into model and optimizer."""

    def __call__(
        self,
        state: RunState,
        model: Module,
        optimizer: Optimizer | None,
        whole_model: Module,
        whole_optimizer: Optimizer | None,
    ) -> None: ...


@frozen
class WholeState:
    """How a backend gets at the whole state."""

    take: TakeState
    put: PutState


# ------------------------------------------------------------------------------------------- where everything is whole


def take_itself(
    state: RunState, model: Module, optimizer: Optimizer | None, keep: bool = True
) -> tuple[Module, Optimizer | None]:
    """The user's module and the optimizer themselves."""
    return unwrap_model(model), optimizer


def put_nothing(
    state: RunState,
    model: Module,
    optimizer: Optimizer | None,
    whole_model: Module,
    whole_optimizer: Optimizer | None,
) -> None:
    """They were changed in place."""


IN_PROCESS = WholeState(take_itself, put_nothing)


# ------------------------------------------------------------------------------------------------------------ skeletons


def skeleton(model: Module, gather: Callable[[Tensor], Tensor], keep: bool = True) -> Module:
    """Bare modules that hold what ``gather`` makes of each parameter and buffer, tied ones once, on the CPU."""
    known: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            gathered = gather(tensor.detach() if not isinstance(tensor, Parameter) else tensor).detach()
            held = gathered.cpu().clone() if keep else torch.empty(0, dtype=gathered.dtype)
            known[id(tensor)] = Parameter(held, tensor.requires_grad) if isinstance(tensor, Parameter) else held
        return known[id(tensor)]

    def bare(module: Module) -> Module:
        made = Module()
        for name, parameter in module._parameters.items():
            made.register_parameter(name, None if parameter is None else _parameter(copied(parameter)))
        for name, buffer in module._buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            made.register_buffer(name, None if buffer is None else copied(buffer), persistent=persistent)
        for name, child in module._modules.items():
            made.register_module(name, None if child is None else bare(child))
        return made

    return bare(model)


def _parameter(tensor: Tensor) -> Parameter:
    assert isinstance(tensor, Parameter)
    return tensor


def optimizer_of(
    skeleton_model: Module, optimizer: Optimizer, groups: list[list[str]], state: dict[str, dict[str, object]]
) -> Optimizer:
    """An optimizer of the same class and settings that holds the skeleton's parameters, with this state by their names."""
    parameters = dict(skeleton_model.named_parameters())
    made = copy.copy(optimizer)
    made.param_groups = [
        {**group, "params": [parameters[name] for name in names]}
        for group, names in zip(optimizer.param_groups, groups, strict=True)
    ]
    made.state = defaultdict(dict, {parameters[name]: dict(entry) for name, entry in state.items()})
    return made


def put_hyperparameters(optimizer: Optimizer, whole_optimizer: Optimizer) -> None:
    """Learning rates and the like."""
    for group, loaded in zip(optimizer.param_groups, whole_optimizer.param_groups, strict=True):
        group.update({key: value for key, value in loaded.items() if key != "params"})


def put_buffers(model: Module, whole_model: Module) -> None:
    """Buffers are whole on every rank."""
    for buffer, loaded in zip(model.buffers(), whole_model.buffers(), strict=True):
        buffer.copy_(loaded)


# -------------------------------------------------------------------------------------------------------------- DTensor


def take_sharded(
    state: RunState, model: Module, optimizer: Optimizer | None, keep: bool = True
) -> tuple[Module, Optimizer | None]:
    """Gathers each ``DTensor``."""
    plain = unwrap_model(model)
    reshard(plain)
    made = skeleton(plain, whole, keep)
    if optimizer is None:
        return made, None
    groups = names_in_groups(optimizer, plain)
    entries: dict[str, dict[str, object]] = {}
    for held in (name for group in groups for name in group):
        parameter = plain.get_parameter(held)
        if parameter in optimizer.state:
            entry = {key: _gathered(value) for key, value in optimizer.state[parameter].items()}
            entries[held] = entry if keep else {}
    return made, optimizer_of(made, optimizer, groups, entries)


def _gathered(value: object) -> object:
    return whole(value).cpu().clone() if isinstance(value, Tensor) else value


def put_sharded(
    state: RunState,
    model: Module,
    optimizer: Optimizer | None,
    whole_model: Module,
    whole_optimizer: Optimizer | None,
) -> None:
    """Each rank takes its part of what all have: nothing is sent."""
    plain = unwrap_model(model)
    reshard(plain)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            local_part(parameter).copy_(local_part(cut_as(parameter, whole_model.get_parameter(name))))
        put_buffers(plain, whole_model)
        if optimizer is None or whole_optimizer is None:
            return
        put_hyperparameters(optimizer, whole_optimizer)
        optimizer.state.clear()
        for name, parameter in plain.named_parameters():
            entry = whole_optimizer.state.get(whole_model.get_parameter(name))
            if entry:
                optimizer.state[parameter] = {key: _cut(parameter, key, value) for key, value in entry.items()}


def cut_as(parameter: Tensor, value: Tensor) -> Tensor:
    """This rank's part of ``value``, as ``parameter`` is cut."""
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    local = value.to(parameter.device_mesh.device_type)
    return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _cut(parameter: Tensor, key: str, value: object) -> object:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or key == "step":
        return value
    return cut_as(parameter, value.to(local_part(parameter).device))


SHARDED = WholeState(take_sharded, put_sharded)
