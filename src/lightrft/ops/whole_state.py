"""The whole state of a model and its optimizer, where a process holds only parts: out for a checkpoint, and back in.

A checkpoint is written from, and read into, an *outline*: modules with the names, parameters and buffers of the model and
nothing else, without memory, and a copy of the optimizer that holds the outline's parameters. Values are gathered one by
one as they are written, and taken from the file's own memory as they are loaded. So every backend writes the same files,
any of them reads what another wrote, and no rank ever holds a whole model.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightrft.checkpoints.reading import Read, as_it_is
from lightrft.ops.clipping import local_part
from lightrft.ops.models import reshard, unwrap_model, whole
from lightrft.ops.sharding import names_in_groups
from lightrft.strategy.record import RunState, bind


@frozen(eq=False)
class Outline:
    """A model and its optimizer as a checkpoint has them, by names and shapes; ``read`` gives a tensor's values."""

    model: Module
    optimizer: Optimizer | None
    read: Read
    """Where state is cut, it gathers, and all ranks have to read the same tensors in the same order."""
    parameters: Mapping[str, Tensor]
    """By name, as the optimizer's state is keyed by them."""
    holds_values: bool = False


class OutlineState(Protocol):
    """The outline of a model and its optimizer. Nothing is sent."""

    def __call__(self, state: RunState, model: Module, optimizer: Optimizer | None) -> Outline: ...


class PutState(Protocol):
    """What was loaded into an outline, into the model, and with ``with_optimizer`` into the optimizer. The values are
    the same on every rank; parameters that have none stay as they are."""

    def __call__(
        self, state: RunState, model: Module, optimizer: Optimizer | None, outline: Outline, with_optimizer: bool
    ) -> None: ...


@frozen
class WholeState:
    """How a backend gets at the whole state."""

    outline: OutlineState
    put: PutState


# ------------------------------------------------------------------------------------------- where everything is whole


def outline_itself(state: RunState, model: Module, optimizer: Optimizer | None) -> Outline:
    """The user's module and the optimizer themselves."""
    plain = unwrap_model(model)
    return Outline(plain, optimizer, as_it_is, dict(plain.named_parameters()), holds_values=True)


def put_nothing(
    state: RunState, model: Module, optimizer: Optimizer | None, outline: Outline, with_optimizer: bool
) -> None:
    """They were changed in place."""


IN_PROCESS = WholeState(outline_itself, put_nothing)


# ------------------------------------------------------------------------------------------------------------- outlines


@define(eq=False)
class Sources:
    """What each placeholder stands for."""

    gathers: dict[int, Callable[[], Tensor]] = field(factory=dict)
    placeholders: list[Tensor] = field(factory=list)
    """Kept alive, since they are known by identity."""

    def placeholder(self, shape: torch.Size, dtype: torch.dtype, gather: Callable[[], Tensor]) -> Tensor:
        """A tensor without memory whose values ``gather`` gives."""
        made = torch.empty(shape, dtype=dtype, device="meta")
        return self.known(made, gather)

    def known(self, tensor: Tensor, gather: Callable[[], Tensor]) -> Tensor:
        """``tensor`` itself, remembered."""
        self.gathers[id(tensor)] = gather
        self.placeholders.append(tensor)
        return tensor

    def read(self, tensor: Tensor, /) -> Tensor:
        """Its values; those of a tensor that is no placeholder are its own."""
        gather = self.gathers.get(id(tensor))
        return tensor if gather is None else gather()


def skeleton(
    model: Module,
    sources: Sources,
    form: Callable[[Tensor], tuple[torch.Size, torch.dtype]],
    gather: Callable[[Tensor], Tensor],
) -> Module:
    """Bare modules with the names, parameters and buffers of ``model``, all placeholders; tied ones once."""
    made_of: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in made_of:
            shape, dtype = form(tensor)
            empty = torch.empty(shape, dtype=dtype, device="meta")
            made = Parameter(empty, tensor.requires_grad) if isinstance(tensor, Parameter) else empty
            made_of[id(tensor)] = sources.known(made, bind(_gathered, (gather, tensor)))
        return made_of[id(tensor)]

    def bare(module: Module) -> Module:
        made = Module()
        for name, parameter in module._parameters.items():
            made.register_parameter(name, None if parameter is None else _parameter(stand_in(parameter)))
        for name, buffer in module._buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            made.register_buffer(name, None if buffer is None else stand_in(buffer), persistent=persistent)
        for name, child in module._modules.items():
            made.register_module(name, None if child is None else bare(child))
        return made

    return bare(model)


def _gathered(given: tuple[Callable[[Tensor], Tensor], Tensor]) -> Tensor:
    gather, tensor = given
    return gather(tensor).detach()


def _parameter(tensor: Tensor) -> Parameter:
    assert isinstance(tensor, Parameter)
    return tensor


def optimizer_of(
    parameters: Mapping[str, Tensor],
    optimizer: Optimizer,
    groups: Sequence[Sequence[str]],
    state: Mapping[str, dict[str, object]],
) -> Optimizer:
    """An optimizer of the same class and settings that holds placeholders, with this state by their names."""
    made = copy.copy(optimizer)
    made.param_groups = [
        {**group, "params": [parameters[name] for name in names]}
        for group, names in zip(optimizer.param_groups, groups, strict=True)
    ]
    made.state = defaultdict(dict, {parameters[name]: dict(entry) for name, entry in state.items()})
    return made


def put_hyperparameters(optimizer: Optimizer, loaded: Optimizer) -> None:
    """Learning rates and the like."""
    for group, settings in zip(optimizer.param_groups, loaded.param_groups, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


def put_buffers(model: Module, outline: Outline) -> None:
    """Buffers are whole on every rank."""
    for buffer, loaded in zip(model.buffers(), outline.model.buffers(), strict=True):
        if not loaded.is_meta:
            buffer.copy_(loaded)


# -------------------------------------------------------------------------------------------------------------- DTensor


def form_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype of the whole; a ``DTensor`` tells those."""
    return tensor.shape, tensor.dtype


def outline_sharded(state: RunState, model: Module, optimizer: Optimizer | None) -> Outline:
    """Each ``DTensor`` is gathered when it is read."""
    plain = unwrap_model(model)
    reshard(plain)
    sources = Sources()
    made = skeleton(plain, sources, form_of, whole)
    parameters = dict(made.named_parameters())
    if optimizer is None:
        return Outline(made, None, sources.read, parameters)
    groups = names_in_groups(optimizer, plain)
    entries: dict[str, dict[str, object]] = {}
    for name in (name for group in groups for name in group):
        entry = optimizer.state.get(plain.get_parameter(name))
        if entry:
            entries[name] = {key: _stand_in(sources, value) for key, value in entry.items()}
    return Outline(made, optimizer_of(parameters, optimizer, groups, entries), sources.read, parameters)


def _stand_in(sources: Sources, value: object) -> object:
    if not isinstance(value, DTensor):
        return value
    return sources.placeholder(value.shape, value.dtype, bind(whole, value))


def put_sharded(
    state: RunState, model: Module, optimizer: Optimizer | None, outline: Outline, with_optimizer: bool
) -> None:
    """Each rank takes its part of what all have: nothing is sent."""
    plain, loaded = unwrap_model(model), outline.optimizer
    reshard(plain)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            value = outline.model.get_parameter(name)
            if not value.is_meta:
                local_part(parameter).copy_(local_part(cut_as(parameter, value.detach())))
        put_buffers(plain, outline)
        if optimizer is None or loaded is None or not with_optimizer:
            return
        put_hyperparameters(optimizer, loaded)
        optimizer.state.clear()
        for name, parameter in plain.named_parameters():
            entry = loaded.state.get(outline.parameters[name])
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
    return cut_as(parameter, value.to(local_part(parameter).device)).clone()  # not in the memory of the whole


SHARDED = WholeState(outline_sharded, put_sharded)
