"""The weights of ``hf``: the trainer's own ones, or those of a copy of the model, which has to be given them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, cast

import torch
from attrs import define
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightrft.errors import EngineError
from lightrft.ops.models import reshard
from lightrft.ops.weight_sync import plain_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@define(eq=False)
class Incomplete:
    """The parameters that a copy of the model was not given yet, by their first names."""

    awaited: frozenset[str]


def check_own(model: Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ``EngineError`` for a tensor that is not the model's own."""
    own = named_tensors_of(model)
    for name, tensor in named_tensors:
        if name not in own:
            raise no_parameter(name)
        if tensor.data_ptr() != own[name].data_ptr():
            raise EngineError(
                f"engine 'hf' generates from the module that it was made with, and {name!r} is another module's. "
                f"Set the engine up with this actor."
            )


def copy_weights(model: Module, incomplete: Incomplete, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Into the model, in its dtype and on its device. Raises ``EngineError``; see :meth:`HfEngine.update_weights`."""
    own = named_tensors_of(model)
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    # An update that fails leaves weights of two models: all are then awaited anew.
    awaited, incomplete.awaited = incomplete.awaited, parameter_names(model)
    for name, tensor in named_tensors:
        if name not in own:
            raise no_parameter(name)
        if tensor.shape != own[name].shape:
            raise EngineError(
                f"engine 'hf' got {name!r} of shape {tuple(tensor.shape)} where its own is {tuple(own[name].shape)}. "
                f"Pass whole parameters, of the model that the engine was made with."
            )
        own[name].detach().copy_(tensor)
        awaited -= {first_names.get(id(own[name]), name)}
    if awaited:
        raise EngineError(
            f"engine 'hf' was not given {len(awaited)} of its parameters, such as {min(awaited)!r}. "
            f"Pass all parameters of the actor in the first update."
        )
    incomplete.awaited = awaited


def named_tensors_of(model: Module) -> dict[str, Tensor]:
    """Parameters and buffers; a tied one by each of its names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def parameter_names(model: Module) -> frozenset[str]:
    """A tied parameter by its first name alone."""
    return frozenset(name for name, _ in model.named_parameters())


def no_parameter(name: str) -> EngineError:
    """The error for a name that the model does not have."""
    return EngineError(f"engine 'hf' has no parameter {name!r}. Pass the names of the plain, unwrapped model.")


def empty_copy(model: Module, device: torch.device) -> Module:
    """A model of the same config in eval mode, parameters not set and without gradients, buffers copied."""
    reshard(model)  # what FSDP2 keeps whole after a forward has the dtype that it computes in
    theirs = cast("PreTrainedModel", base_model(model))
    # FSDP2 makes a class of its own out of the model's.
    kind = next(kind for kind in type(theirs).__mro__ if not issubclass(kind, FSDPModule))
    make = cast("Callable[..., Module]", kind._from_config)  # type: ignore[attr-defined]  # what from_config calls
    with torch.device("meta"):  # so that no random numbers are drawn and no memory is written twice
        own = make(deepcopy(theirs.config), dtype=theirs.dtype)  # it writes the dtype into the config
    own.to_empty(device=device)
    cast("PreTrainedModel", own).tie_weights()  # to_empty makes two parameters of a tied one
    for name, buffer in model.named_buffers():
        path, _, attribute = plain_name(name).rpartition(".")
        setattr(own.get_submodule(path), attribute, buffer.detach().to(device, copy=True))
    return own.eval().requires_grad_(False)


def base_model(model: Module) -> Module:
    """The Hugging Face model, out of what PEFT has made of it."""
    get_base_model: Callable[[], Module] | None = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()
