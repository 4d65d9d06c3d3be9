"""From micro-batches to one update: ``backward`` and ``optimizer_step`` (T1, T2, T4, T5, T7)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.ops.clipping import ClipGradients
from lightrft.ops.models import unwrap_model
from lightrft.strategy.protocol import StepOutcome
from lightrft.strategy.record import RunState, TrainedModel, Window

logger = logging.getLogger(__name__)


def window_of(state: RunState, optimizer: Optimizer) -> Window:
    """The accumulation of this optimizer, and of no other."""
    return state.windows.setdefault(optimizer, Window())


def trained_model(state: RunState, model: Module) -> TrainedModel:
    """What is known of this model's training."""
    return state.trained.setdefault(unwrap_model(model), TrainedModel())


def held_parameters(optimizer: Optimizer) -> Iterable[Parameter]:
    """Every parameter that the optimizer updates."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def refuse_unknown(operation: str, unknown: Iterable[str]) -> None:
    """Refuses keywords that nothing would read: an ignored one hides a misspelt one."""
    names = sorted(unknown)
    if names:
        raise TypeError(f"{operation}() got {', '.join(names)}, which nothing reads. Remove it, or check its spelling.")


def check_loss(loss: Tensor) -> None:
    """Refuses a loss from which no gradient of one micro-batch can come."""
    if loss.numel() != 1:
        raise ValueError(
            f"backward needs a scalar loss, got shape {tuple(loss.shape)}. Pass the mean over the micro-batch."
        )
    if not loss.requires_grad:
        raise ValueError(
            "backward got a loss that needs no gradient. Compute it outside torch.no_grad(), from a model whose "
            "parameters are trainable."
        )


def backward(state: RunState, /, loss: Tensor, model: Module, optimizer: Optimizer, **kwargs: object) -> None:
    """Adds the gradient of ``loss / A``."""
    refuse_unknown("backward", kwargs)
    check_loss(loss)
    if unwrap_model(model) in state.offloaded:
        raise RuntimeError("backward on a model that is offloaded. Call strategy.reload_model(model) first.")
    window = window_of(state, optimizer)
    if window.micro_batches and all(parameter.grad is None for parameter in held_parameters(optimizer)):
        window.restart()  # the caller's own zero_grad() dropped what was there
    micro_batches = state.accumulated_gradient
    (loss / micro_batches if micro_batches > 1 else loss).backward()  # type: ignore[no-untyped-call]  # torch's stub
    window.micro_batches += 1


def clear_gradients(model: Module, optimizer: Optimizer) -> None:
    """Frees the gradients of all that was part of the backward pass, held by the optimizer or not."""
    model.zero_grad(set_to_none=True)
    optimizer.zero_grad(set_to_none=True)


@frozen
class Stepping:
    """What ``optimizer_step`` works with: the run, and how this backend measures and clips gradients."""

    run: RunState
    clip: ClipGradients


def optimizer_step(
    stepping: Stepping,
    /,
    optimizer: Optimizer,
    model: Module,
    scheduler: LRScheduler | None = None,
    name: str = "model",
    *,
    flush: bool = False,
    **kwargs: object,
) -> StepOutcome:
    """Counts, and at the end of a window clips and updates."""
    refuse_unknown("optimizer_step", kwargs)
    run = stepping.run
    window = window_of(run, optimizer)
    window.calls += 1
    due = window.calls >= run.accumulated_gradient
    if not due and not (flush and window.micro_batches):
        return StepOutcome(applied=False, micro_step=window.calls, grad_norm=None, skipped_nonfinite=False)
    # A window cut short was divided by A all the same; what it has is a mean over fewer.
    short = flush and 0 < window.micro_batches < run.accumulated_gradient
    rescale = run.accumulated_gradient / window.micro_batches if short else 1.0
    micro_step = window.calls
    window.restart()
    norm = stepping.clip(model, run.config.max_norm, rescale)
    finite = math.isfinite(norm)
    if finite:
        optimizer.step()
        window.updates += 1
        if scheduler is not None:
            scheduler.step()
    else:
        logger.warning("%s: gradient norm is %s; this update is skipped on all ranks", name, norm)
    clear_gradients(model, optimizer)
    trained = trained_model(run, model)
    trained.grad_norm, trained.optimizer = norm, optimizer
    if scheduler is not None:
        trained.scheduler = scheduler
    return StepOutcome(applied=finite, micro_step=micro_step, grad_norm=norm, skipped_nonfinite=not finite)


def get_grad_norm(state: RunState, model: Module) -> float:
    """The norm of what has been accumulated, or of the last update."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(get_total_norm(gradients)) if gradients else trained_model(state, model).grad_norm


def moving_average(state: RunState, model: Module, model_ema: Module, beta: float = 0.992) -> None:
    """Averages parameters; buffers, which are no averages of training, are copied."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta={beta} is no weight of an average. Pass a value from 0 to 1.")
    trained = trained_model(state, model)
    if trained.optimizer is not None:
        updates = window_of(state, trained.optimizer).updates
        if trained.averaged_at.get(model_ema, 0) == updates:
            return
        trained.averaged_at[model_ema] = updates
    source, target = unwrap_model(model), unwrap_model(model_ema)
    with torch.no_grad():
        averages = dict(target.named_parameters())
        for parameter_name, parameter in source.named_parameters():
            average = averages[parameter_name]
            average.lerp_(parameter.to(average.device, average.dtype), 1.0 - beta)
        for buffer, copy in zip(source.buffers(), target.buffers(), strict=True):
            copy.copy_(buffer)
