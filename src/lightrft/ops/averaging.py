"""The moving average of a model's parameters (T12)."""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module

from lightrft.ops.accumulation import trained_model, window_of
from lightrft.ops.clipping import local_part
from lightrft.ops.models import unwrap_model, whole
from lightrft.strategy.record import RunState


class AverageInto(Protocol):
    """``average = average + weight * (parameter - average)``, in place, whatever part of each is in this process."""

    def __call__(self, average: Tensor, parameter: Tensor, weight: float) -> None: ...


@frozen(eq=False)
class Averaging:
    """What ``moving_average`` works with."""

    run: RunState
    average_into: AverageInto


def average_tensors(average: Tensor, parameter: Tensor, weight: float) -> None:
    """Whole tensors or shards; where both are cut alike, nothing is sent."""
    if isinstance(average, DTensor):
        alike = isinstance(parameter, DTensor) and (
            parameter.device_mesh == average.device_mesh and parameter.placements == average.placements
        )
        cut = parameter if alike else distribute_tensor(whole(parameter), average.device_mesh, average.placements)
        source = local_part(cut)
    else:
        source = whole(parameter)
    target = local_part(average)
    target.lerp_(source.to(target.device, target.dtype), weight)


def moving_average(averaging: Averaging, model: Module, model_ema: Module, beta: float = 0.992) -> None:
    """Averages parameters; buffers, which are no averages of training, are copied."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta={beta} is no weight of an average. Pass a value from 0 to 1.")
    trained = trained_model(averaging.run, model)
    if trained.optimizer is not None:
        updates = window_of(averaging.run, trained.optimizer).applied_here
        if trained.averaged_at.get(model_ema, 0) == updates:
            return
        trained.averaged_at[model_ema] = updates
    source, target = unwrap_model(model), unwrap_model(model_ema)
    with torch.no_grad():
        averages = dict(target.named_parameters())
        for name, parameter in source.named_parameters():
            averaging.average_into(averages[name], parameter, 1.0 - beta)
        for buffer, copy in zip(source.buffers(), target.buffers(), strict=True):
            copy.copy_(buffer)
