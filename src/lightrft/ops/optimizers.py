"""The optimizer of a model, and moving its state (T9, FC44)."""

from __future__ import annotations

import torch
from torch.nn import Module, Parameter
from torch.optim import AdamW, Optimizer
from typing_extensions import Unpack

from lightrft.strategy.protocol import AdamWOptions, OptimizerT
from lightrft.strategy.record import RunState

KEYWORDS = AdamWOptions.__optional_keys__


def parameter_groups(model: Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: what weight decay shrinks, and what it must not (biases, norms, all of fewer than 2 dimensions).

    ``named_parameters`` gives a tied parameter once. An empty group is left out.
    """
    decayed: list[Parameter] = []
    undecayed: list[Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # DeepSpeed's stage 3 may have cut it already, and keeps its shape aside.
            dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
            plain = dimensions >= 2 and not name.endswith("bias")
            (decayed if plain else undecayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def create_optimizer(state: RunState, /, model: Module, **kwargs: Unpack[AdamWOptions]) -> Optimizer:
    """AdamW with the configuration's learning rate, betas and weight decay where the caller names none."""
    unknown = sorted(set(kwargs) - KEYWORDS)
    if unknown:
        raise TypeError(f"create_optimizer() got {', '.join(unknown)}. AdamW takes {', '.join(sorted(KEYWORDS))}.")
    config = state.config
    defaults: AdamWOptions = {"lr": config.actor_learning_rate, "betas": config.adam_betas, "weight_decay": config.l2}
    options: AdamWOptions = {**defaults, **kwargs}
    first, second = options["betas"]
    options["betas"] = (float(first), float(second))  # a list would be saved as one, and compare unequal (FC19)
    groups = parameter_groups(model, options["weight_decay"])
    if not groups:
        raise ValueError(
            "create_optimizer got a model without trainable parameters. Set requires_grad on those to train, or, for a "
            "model that is only evaluated, make no optimizer."
        )
    return AdamW(groups, **options)


def move_state(optimizer: OptimizerT, device: torch.device | str) -> OptimizerT:
    """The same optimizer, its moments on ``device``. Step counters stay: torch keeps them on the CPU on purpose."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                state[key] = value.to(device, non_blocking=True)
    return optimizer


def maybe_offload_optimizer(state: RunState, optimizer: OptimizerT) -> OptimizerT:
    """To the CPU, unless this is the CPU."""
    return optimizer if state.device.type == "cpu" else move_state(optimizer, "cpu")


def maybe_load_optimizer(
    state: RunState, optimizer: OptimizerT, device: torch.device | str | None = None
) -> OptimizerT:
    """To ``device``, or the strategy's."""
    target = state.device if device is None else torch.device(device)
    return optimizer if target.type == state.device.type == "cpu" else move_state(optimizer, target)
