"""Modules and what is wrapped around them: unwrapping, placing, mixed precision, names (T10, T11, T12)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

WRAPPER_ATTRIBUTES = ("module", "_orig_mod", "model")
"""Where engines and DistributedDataParallel, ``torch.compile``, and actor wrappers keep the user's module."""


def inner_module(model: Module) -> Module | None:
    """What ``model`` is wrapped around, or None.

    A wrapper holds another module and no parameter beside it. A Hugging Face model is never one, though its decoder is
    called ``model`` and may, with tied embeddings, hold all of its parameters.
    """
    if hasattr(type(model), "save_pretrained"):  # of the class: an engine answers for the model inside
        return None
    for attribute in WRAPPER_ATTRIBUTES:
        inner = getattr(model, attribute, None)
        if isinstance(inner, Module) and _holds_all(inner, model):
            return inner
    return None


def _holds_all(inner: Module, model: Module) -> bool:
    """Whether ``model`` has no parameter that ``inner`` lacks. Asked at each backward: most often nothing is beside it."""
    beside = [*model._parameters.values(), *(child for child in model.children() if child is not inner)]
    if not any(part is not None for part in beside):
        return True
    inside = {id(parameter) for parameter in inner.parameters()}
    return all(id(parameter) in inside for parameter in model.parameters())


def unwrap_model(model: Module) -> Module:
    """The user's module."""
    inner = inner_module(model)
    return model if inner is None else unwrap_model(inner)


class WholeWeights(Protocol):
    """The parameters of a model, whole on every rank, one after another, by their names in the plain module; tied ones once.

    Every rank has to go through all of them: each may be gathered as it comes.
    """

    def __call__(self, model: Module) -> Iterator[tuple[str, Tensor]]: ...


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the shards of all ranks, if it is a ``DTensor``; else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_weights(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters that torch keeps: whole ones, and ``DTensor``s, which are gathered."""
    plain = unwrap_model(model)
    reshard(plain)
    for name, parameter in plain.named_parameters():
        yield name, whole(parameter.detach())


def reshard(model: Module) -> None:
    """Lets go of what FSDP2 keeps whole after a forward: it is a copy, which the next update would leave behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def cache_keyword(model: Module) -> str:
    """The keyword of a language model's forward for keys and values: transformers renames ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(unwrap_model(model).forward).parameters else "past_key_values"


def place(model: Module, device: torch.device) -> Module:
    """The model on ``device``. A model that is there already is not touched."""
    tensors = [*model.parameters(), *model.buffers()]
    return model if all(tensor.device == device for tensor in tensors) else model.to(device)


def keep_master_weights(model: Module) -> None:
    """Parameters in fp32, in place: an update far below bf16's resolution must not be lost (Micikevicius et al.,
    arXiv:1710.03740, section 3.1)."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def compute_in_bf16(model: Module, device: torch.device) -> list[RemovableHandle]:
    """Runs every forward of ``model``, and so its backward, under bfloat16 autocast.

    Parameters and their gradients stay in fp32. By hooks, so that the module, its class and its names stay the user's.
    """
    contexts: list[torch.autocast] = []

    def enter(module: Module, args: object) -> None:
        context = torch.autocast(device.type, dtype=torch.bfloat16)
        context.__enter__()  # type: ignore[no-untyped-call]  # torch's stub
        contexts.append(context)

    def leave(module: Module, args: object, output: object) -> None:
        contexts.pop().__exit__(None, None, None)

    return [
        model.register_forward_pre_hook(enter),
        model.register_forward_hook(leave, always_call=True),
    ]
