"""From micro-batches to one update: ``backward`` and ``optimizer_step`` (T1, T2, T4, T5, T7).

What a window is, when it ends and what follows is here, once, for every backend. Where gradients lie and what one update
is, differs: a backend brings that as its ``Gradients``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Protocol

from attrs import frozen
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.ops.clipping import clip_gradients, global_norm
from lightrft.ops.models import unwrap_model
from lightrft.ops.peers import naming_peers
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


class AddGradient(Protocol):
    """Adds the gradient of ``loss`` to what the window has, as the mean over the ranks."""

    def __call__(self, state: RunState, loss: Tensor, model: Module, optimizer: Optimizer) -> None: ...


class WereDropped(Protocol):
    """Whether the caller's own ``optimizer.zero_grad()`` dropped what the window had; then there is nothing left of it."""

    def __call__(self, state: RunState, model: Module, optimizer: Optimizer) -> bool: ...


class ApplyUpdate(Protocol):
    """Multiplies the gradients by ``rescale``, clips, updates and clears them; returns the norm before clipping.

    A norm that is not finite, on any rank, changes no parameter and no optimizer state on any of them.
    """

    def __call__(self, state: RunState, model: Module, optimizer: Optimizer, rescale: float) -> float: ...


class NormNow(Protocol):
    """The global 2-norm of what has been accumulated; None where there is nothing."""

    def __call__(self, state: RunState, model: Module) -> float | None: ...


@frozen
class Gradients:
    """How a backend keeps gradients."""

    add: AddGradient
    were_dropped: WereDropped
    apply: ApplyUpdate
    norm: NormNow


@frozen(eq=False)
class Accumulating:
    """What ``backward``, ``optimizer_step`` and ``get_grad_norm`` work with."""

    run: RunState
    gradients: Gradients


def backward(
    accumulating: Accumulating, /, loss: Tensor, model: Module, optimizer: Optimizer, **kwargs: object
) -> None:
    """Adds the gradient of ``loss / A``."""
    refuse_unknown("backward", kwargs)
    check_loss(loss)
    state, gradients = accumulating.run, accumulating.gradients
    if unwrap_model(model) in state.offloaded:
        raise RuntimeError("backward on a model that is offloaded. Call strategy.reload_model(model) first.")
    window = window_of(state, optimizer)
    if window.micro_batches and gradients.were_dropped(state, model, optimizer):
        window.restart()
    micro_batches = state.accumulated_gradient
    gradients.add(state, loss / micro_batches if micro_batches > 1 else loss, model, optimizer)
    window.micro_batches += 1


def optimizer_step(
    accumulating: Accumulating,
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
    run = accumulating.run
    window = window_of(run, optimizer)
    gradients = accumulating.gradients
    if flush and (not window.micro_batches or gradients.were_dropped(run, model, optimizer)):
        window.restart()  # nothing to end: the next window is a whole one
        return StepOutcome(applied=False, micro_step=0, grad_norm=None, skipped_nonfinite=False)
    window.calls += 1
    if window.calls < run.accumulated_gradient and not flush:
        return StepOutcome(applied=False, micro_step=window.calls, grad_norm=None, skipped_nonfinite=False)
    # A window cut short was divided by A all the same; what it has is a mean over fewer.
    short = flush and 0 < window.micro_batches < run.accumulated_gradient
    rescale = run.accumulated_gradient / window.micro_batches if short else 1.0
    micro_step = window.calls
    norm = gradients.apply(run, model, optimizer, rescale)
    window.restart()
    finite = math.isfinite(norm)
    if finite:
        window.updates += 1
        window.applied_here += 1
        if scheduler is not None:
            scheduler.step()
    else:
        logger.warning("%s: gradient norm is %s; this update is skipped on all ranks", name, norm)
    trained = trained_model(run, model)
    trained.grad_norm, trained.optimizer = norm, optimizer
    if scheduler is not None:
        trained.scheduler = scheduler
    return StepOutcome(applied=finite, micro_step=micro_step, grad_norm=norm, skipped_nonfinite=not finite)


def get_grad_norm(accumulating: Accumulating, model: Module) -> float:
    """The norm of what has been accumulated, or of the last update."""
    norm = accumulating.gradients.norm(accumulating.run, model)
    return trained_model(accumulating.run, model).grad_norm if norm is None else norm


# ------------------------------------------------------------------------ gradients where torch keeps them, in ``.grad``


def add_gradient(state: RunState, loss: Tensor, model: Module, optimizer: Optimizer) -> None:
    """torch's own backward: whole parameters in one process, or FSDP2's, whose hooks reduce."""
    with naming_peers(state, "backward"):
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub


def no_gradients(state: RunState, model: Module, optimizer: Optimizer) -> bool:
    """No parameter that the optimizer holds has one."""
    return all(parameter.grad is None for parameter in held_parameters(optimizer))


def clear_gradients(model: Module, optimizer: Optimizer) -> None:
    """Frees the gradients of all that was part of the backward pass, held by the optimizer or not."""
    model.zero_grad(set_to_none=True)
    optimizer.zero_grad(set_to_none=True)


def apply_update(state: RunState, model: Module, optimizer: Optimizer, rescale: float) -> float:
    """Clips, and unless the norm forbids it lets the optimizer step."""
    with naming_peers(state, "optimizer_step"):
        norm = clip_gradients(model, state.config.max_norm, rescale)
    if math.isfinite(norm):
        optimizer.step()
    clear_gradients(model, optimizer)
    return norm


def norm_now(state: RunState, model: Module) -> float | None:
    """Over all parameters that have a gradient."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(global_norm(gradients)) if gradients else None


IN_PARAMETERS = Gradients(add_gradient, no_gradients, apply_update, norm_now)
