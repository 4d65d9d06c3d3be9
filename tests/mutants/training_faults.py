"""Faults of training: gradients, windows, clipping, schedulers, optimizers, what ``prepare`` gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import StepOutcome
from lightrft.strategy.record import StrategyRecord
from mutants.mutant import Mutant


def held(optimizer: Optimizer) -> list[nn.Parameter]:
    """Every parameter of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Those that there are."""
    return [parameter.grad for parameter in held(optimizer) if parameter.grad is not None]


# ----------------------------------------------------------------------------------------------------------- backward


def scaled(strategy: StrategyRecord, factor: float) -> StrategyRecord:
    """Each loss counts ``factor`` times."""

    def backward(loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object) -> None:
        strategy.backward(loss * factor, model, optimizer, **kwargs)

    return evolve(strategy, backward=backward)


def loss_not_divided(strategy: StrategyRecord) -> StrategyRecord:
    return scaled(strategy, strategy.accumulated_gradient)


def loss_divided_twice(strategy: StrategyRecord) -> StrategyRecord:
    return scaled(strategy, 1 / strategy.accumulated_gradient)


def summed_over_ranks(strategy: StrategyRecord) -> StrategyRecord:
    return scaled(strategy, strategy.world_size)


def divided_by_ranks_twice(strategy: StrategyRecord) -> StrategyRecord:
    return scaled(strategy, 1 / strategy.world_size)


def callers_loss_scaled(strategy: StrategyRecord) -> StrategyRecord:
    def backward(loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object) -> None:
        strategy.backward(loss, model, optimizer, **kwargs)
        loss.detach().div_(strategy.accumulated_gradient)

    return evolve(strategy, backward=backward)


def any_loss_taken(strategy: StrategyRecord) -> StrategyRecord:
    def backward(loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object) -> None:
        strategy.backward(loss.mean(), model, optimizer, **kwargs)

    return evolve(strategy, backward=backward)


def keywords_swallowed(strategy: StrategyRecord) -> StrategyRecord:
    def backward(loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object) -> None:
        strategy.backward(loss, model, optimizer)

    return evolve(strategy, backward=backward)


def after_backward(strategy: StrategyRecord, change: Any) -> StrategyRecord:
    """``change`` is done to the gradients after each ``backward``."""

    def backward(loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object) -> None:
        strategy.backward(loss, model, optimizer, **kwargs)
        change(model)

    return evolve(strategy, backward=backward)


def clipped_each_micro_batch(strategy: StrategyRecord) -> StrategyRecord:
    def clip(model: nn.Module) -> None:
        if strategy.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), strategy.max_norm)

    return after_backward(strategy, clip)


def last_micro_batch_alone(strategy: StrategyRecord) -> StrategyRecord:
    def backward(loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object) -> None:
        model.zero_grad(set_to_none=False)
        strategy.backward(loss, model, optimizer, **kwargs)

    return evolve(strategy, backward=backward)


def tied_gradient_halved(strategy: StrategyRecord) -> StrategyRecord:
    """Of the two uses of a tied weight one is forgotten."""

    def halve(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name and parameter.grad is not None:
                parameter.grad.mul_(0.5)

    return after_backward(strategy, halve)


def with_models(strategy: StrategyRecord, change: Callable[[nn.Module], None]) -> StrategyRecord:
    """``change`` is done to the model of each pair that ``prepare`` gives back."""

    def prepare(*items: Any, **kwargs: Any) -> Any:
        ready: Any = strategy.prepare(*items, **kwargs)
        if isinstance(ready, tuple):
            change(ready[0])
        return ready

    return evolve(strategy, prepare=prepare)


def one_graph_at_a_time(strategy: StrategyRecord) -> StrategyRecord:
    """A forward drops what the one before it left for its backward."""

    def change(model: nn.Module) -> None:
        last: list[object] = []

        def forget(module: nn.Module, inputs: Any, output: Tensor) -> None:
            this = object()
            last[:] = [this]
            if output.requires_grad:
                keep = cast("Callable[[Callable[[Tensor], Tensor]], object]", output.register_hook)
                keep(lambda gradient: gradient if last[0] is this else gradient * 0)

        model.register_forward_hook(forget)

    return with_models(strategy, change)


def divided_by_forwards(strategy: StrategyRecord) -> StrategyRecord:
    """Micro-batches are counted by forwards and not by calls of ``backward``."""
    forwards: list[bool] = []

    def backward(loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object) -> None:
        strategy.backward(loss / max(len(forwards), 1), model, optimizer, **kwargs)
        forwards.clear()

    def count(*_: object) -> None:
        forwards.append(True)

    def change(model: nn.Module) -> None:
        model.register_forward_hook(count)

    return evolve(with_models(strategy, change), backward=backward)


def gathered_weights_kept(strategy: StrategyRecord) -> StrategyRecord:
    """Forwards without gradients go on with the weights that the first of them had gathered."""

    def change(model: nn.Module) -> None:
        kept: dict[nn.Parameter, Tensor] = {}

        def swap(module: nn.Module, *_: object) -> None:
            if not torch.is_grad_enabled():
                for parameter in module.parameters():
                    kept.setdefault(parameter, parameter.detach().clone())
                    parameter.data, kept[parameter] = kept[parameter], parameter.data

        model.register_forward_pre_hook(swap)
        model.register_forward_hook(swap)

    return with_models(strategy, change)


def gradients_in_bf16(strategy: StrategyRecord) -> StrategyRecord:
    def round_off(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16())

    return after_backward(strategy, round_off)


def zero_grad_undone(strategy: StrategyRecord) -> StrategyRecord:
    kept: dict[nn.Parameter, Tensor] = {}

    def backward(loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object) -> None:
        for parameter in held(optimizer):
            if parameter.grad is None and parameter in kept:
                parameter.grad = kept[parameter].clone()
        strategy.backward(loss, model, optimizer, **kwargs)
        kept.update({each: each.grad.clone() for each in held(optimizer) if each.grad is not None})

    def optimizer_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> StepOutcome:
        outcome = strategy.optimizer_step(optimizer, *args, **kwargs)
        if outcome.grad_norm is not None:
            kept.clear()
        return outcome

    return evolve(strategy, backward=backward, optimizer_step=optimizer_step)


# ------------------------------------------------------------------------------------------------------ optimizer_step


def steps_one_early(strategy: StrategyRecord) -> StrategyRecord:
    calls: Counter[int] = Counter()

    def optimizer_step(optimizer: Optimizer, *args: Any, flush: bool = False, **kwargs: Any) -> StepOutcome:
        calls[id(optimizer)] += 1
        early = calls[id(optimizer)] % max(strategy.accumulated_gradient - 1, 1) == 0
        return strategy.optimizer_step(optimizer, *args, flush=flush or early, **kwargs)

    return evolve(strategy, optimizer_step=optimizer_step)


def steps_one_late(strategy: StrategyRecord) -> StrategyRecord:
    seen: set[int] = set()

    def optimizer_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> StepOutcome:
        if id(optimizer) not in seen:
            seen.add(id(optimizer))
            return StepOutcome(applied=False, micro_step=1, grad_norm=None, skipped_nonfinite=False)
        return strategy.optimizer_step(optimizer, *args, **kwargs)

    return evolve(strategy, optimizer_step=optimizer_step)


def one_count_for_a_name(strategy: StrategyRecord) -> StrategyRecord:
    calls: Counter[str] = Counter()

    def optimizer_step(
        optimizer: Optimizer, model: nn.Module, scheduler: Any = None, name: str = "model", **kwargs: Any
    ) -> StepOutcome:
        calls[name] += 1
        kwargs["flush"] = kwargs.get("flush", False) or calls[name] % strategy.accumulated_gradient == 0
        return strategy.optimizer_step(optimizer, model, scheduler, name, **kwargs)

    return evolve(strategy, optimizer_step=optimizer_step)


def before_step(strategy: StrategyRecord, change: Any) -> StrategyRecord:
    """``change`` is done before each ``optimizer_step``."""

    def optimizer_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> StepOutcome:
        change(optimizer)
        return strategy.optimizer_step(optimizer, *args, **kwargs)

    return evolve(strategy, optimizer_step=optimizer_step)


def after_step(strategy: StrategyRecord, change: Any) -> StrategyRecord:
    """``change`` makes another outcome of each."""

    def optimizer_step(
        optimizer: Optimizer, model: nn.Module, scheduler: Any = None, *args: Any, **kwargs: Any
    ) -> StepOutcome:
        outcome: StepOutcome = change(
            strategy.optimizer_step(optimizer, model, scheduler, *args, **kwargs), optimizer, scheduler
        )
        return outcome

    return evolve(strategy, optimizer_step=optimizer_step)


def clipped_per_group(strategy: StrategyRecord) -> StrategyRecord:
    def clip(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], strategy.max_norm or float("inf"))

    return before_step(strategy, clip)


def last_prepared_is_clipped(strategy: StrategyRecord) -> StrategyRecord:
    """The backend beneath does not clip: see its ``configure``."""
    prepared: list[Optimizer] = []

    def prepare(*items: Any, **kwargs: Any) -> Any:
        prepared.extend(item[1] for item in items if isinstance(item, tuple) and item[1] is not None)
        return strategy.prepare(*items, **kwargs)

    def clip(optimizer: Optimizer) -> None:
        nn.utils.clip_grad_norm_(held(prepared[-1]), 1.0)

    return evolve(before_step(strategy, clip), prepare=prepare)


def unclipped(config: StrategyConfig) -> StrategyConfig:
    return evolve(config, max_norm=0.0)


def norm_after_clipping(strategy: StrategyRecord) -> StrategyRecord:
    def told(outcome: StepOutcome, *_: object) -> StepOutcome:
        most = strategy.max_norm or float("inf")
        return outcome if outcome.grad_norm is None else evolve(outcome, grad_norm=min(outcome.grad_norm, most))

    return after_step(strategy, told)


def nonfinite_becomes_zero(strategy: StrategyRecord) -> StrategyRecord:
    def zero(optimizer: Optimizer) -> None:
        for gradient in gradients(optimizer):
            gradient.nan_to_num_(0.0, 0.0, 0.0)

    return before_step(strategy, zero)


def the_unused_moves(strategy: StrategyRecord) -> StrategyRecord:
    def fill(optimizer: Optimizer) -> None:
        for parameter in held(optimizer):
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)

    return before_step(strategy, fill)


def skip_keeps_gradients(strategy: StrategyRecord) -> StrategyRecord:
    kept: dict[nn.Parameter, Tensor] = {}

    def keep(optimizer: Optimizer) -> None:
        kept.update({each: each.grad.clone() for each in held(optimizer) if each.grad is not None})

    def restore(outcome: StepOutcome, *_: object) -> StepOutcome:
        if outcome.skipped_nonfinite:
            for parameter, gradient in kept.items():
                parameter.grad = gradient
        return outcome

    return before_step(after_step(strategy, restore), keep)


def skip_counts_a_step(strategy: StrategyRecord) -> StrategyRecord:
    def count(outcome: StepOutcome, optimizer: Optimizer, _: object) -> StepOutcome:
        for state in optimizer.state.values():
            if outcome.skipped_nonfinite and "step" in state:
                state["step"] += 1
        return outcome

    return after_step(strategy, count)


def skip_advances_the_scheduler(strategy: StrategyRecord) -> StrategyRecord:
    def advance(outcome: StepOutcome, _: object, scheduler: Any) -> StepOutcome:
        if outcome.skipped_nonfinite and scheduler is not None:
            scheduler.step()
        return outcome

    return after_step(strategy, advance)


def one_rank_tells_no_skip(strategy: StrategyRecord) -> StrategyRecord:
    def told(outcome: StepOutcome, *_: object) -> StepOutcome:
        silent = outcome.skipped_nonfinite and strategy.is_rank_0()
        return evolve(outcome, applied=True, skipped_nonfinite=False) if silent else outcome

    return after_step(strategy, told)


def scheduler_each_micro_batch(strategy: StrategyRecord) -> StrategyRecord:
    def optimizer_step(
        optimizer: Optimizer, model: nn.Module, scheduler: Any = None, *args: Any, **kwargs: Any
    ) -> StepOutcome:
        outcome = strategy.optimizer_step(optimizer, model, None, *args, **kwargs)
        if scheduler is not None:
            scheduler.step()
        return outcome

    return evolve(strategy, optimizer_step=optimizer_step)


def scheduler_forgotten(strategy: StrategyRecord) -> StrategyRecord:
    def optimizer_step(
        optimizer: Optimizer, model: nn.Module, scheduler: Any = None, *args: Any, **kwargs: Any
    ) -> StepOutcome:
        return strategy.optimizer_step(optimizer, model, None, *args, **kwargs)

    return evolve(strategy, optimizer_step=optimizer_step)


def short_window_divided_by_all(strategy: StrategyRecord) -> StrategyRecord:
    have: Counter[int] = Counter()

    def backward(loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object) -> None:
        have[id(optimizer)] += 1
        strategy.backward(loss, model, optimizer, **kwargs)

    def optimizer_step(optimizer: Optimizer, *args: Any, flush: bool = False, **kwargs: Any) -> StepOutcome:
        if flush:
            for gradient in gradients(optimizer):
                gradient.mul_(have[id(optimizer)] / strategy.accumulated_gradient)
        outcome = strategy.optimizer_step(optimizer, *args, flush=flush, **kwargs)
        if outcome.grad_norm is not None:
            have[id(optimizer)] = 0
        return outcome

    return evolve(strategy, backward=backward, optimizer_step=optimizer_step)


def flush_ignored(strategy: StrategyRecord) -> StrategyRecord:
    def optimizer_step(*args: Any, flush: bool = False, **kwargs: Any) -> StepOutcome:
        return strategy.optimizer_step(*args, **kwargs)

    return evolve(strategy, optimizer_step=optimizer_step)


def empty_flush_counts(strategy: StrategyRecord) -> StrategyRecord:
    def optimizer_step(*args: Any, flush: bool = False, **kwargs: Any) -> StepOutcome:
        outcome = strategy.optimizer_step(*args, flush=flush, **kwargs)
        return strategy.optimizer_step(*args, **kwargs) if flush and outcome.micro_step == 0 else outcome

    return evolve(strategy, optimizer_step=optimizer_step)


def norm_forgotten(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, get_grad_norm=lambda model: 0.0)


MUTANTS = (
    Mutant("the-unused-moves", "what no micro-batch used moves all the same", "T1: what", the_unused_moves),
    Mutant("FC01-loss-not-divided", "each micro-batch counts A times", "T1 FC01", loss_not_divided),
    Mutant("loss-divided-twice", "the loss is divided by A a second time", "T1: the gradient", loss_divided_twice),
    Mutant("last-micro-batch-alone", "each backward drops what the window had", "T1: the gradient", last_micro_batch_alone),
    Mutant("one-graph-at-a-time", "a forward drops what the one before left for its backward", "T1: all forwards",
           one_graph_at_a_time),
    Mutant("divided-by-forwards", "micro-batches are counted by forwards", "T1: two", divided_by_forwards),
    Mutant("gathered-weights-kept", "forwards without gradients do not see the update", "T2: an update",
           gathered_weights_kept),
    Mutant("tied-gradient-halved", "of the two uses of a tied weight one gives no gradient", "T6: a two",
           tied_gradient_halved),
    Mutant("summed-over-ranks", "gradients of the ranks are added up and not divided", "T1: the gradient",
           summed_over_ranks, "fsdp", 2),
    Mutant("divided-by-ranks-twice", "the mean over the ranks is divided by W again", "T1 FC01",
           divided_by_ranks_twice, "fsdp", 2),
    Mutant("FC03-callers-loss-scaled", "backward divides the caller's own tensor", "T1 FC03", callers_loss_scaled),
    Mutant("any-loss-taken", "a loss that is no scalar is averaged in silence", "T13", any_loss_taken),
    Mutant("keywords-swallowed", "a keyword that nothing reads is dropped", "T13", keywords_swallowed),
    Mutant("clipped-each-micro-batch", "every backward clips", "T3: clips", clipped_each_micro_batch),
    Mutant("FC21-zero-grad-undone", "gradients are kept where zero_grad does not reach them",
           "T7 FC21: zero_grad", zero_grad_undone),
    Mutant("steps-one-early", "an update comes one call too early", "T2: applies", steps_one_early),
    Mutant("steps-one-late", "the first call is not counted", "T2: applies", steps_one_late),
    Mutant("one-count-for-a-name", "two models of one name share a count", "T2: two models", one_count_for_a_name),
    Mutant("FC04-clipped-per-group", "each group is clipped by its own norm", "T3 FC04", clipped_per_group),
    Mutant("FC05-last-prepared-is-clipped", "the optimizer that was prepared last is clipped, whichever steps",
           "T3 FC05", last_prepared_is_clipped, configure=unclipped),
    Mutant("never-clipped", "max_norm is not carried out", "T3: clips", configure=unclipped),
    Mutant("norm-after-clipping", "grad_norm is the norm after clipping", "T3: clips", norm_after_clipping),
    Mutant("norm-forgotten", "get_grad_norm is 0 after an update", "T3: clips", norm_forgotten),
    Mutant("FC06-nonfinite-becomes-zero", "infinite gradients become 0 and the update goes on", "T4",
           nonfinite_becomes_zero),
    Mutant("skip-keeps-gradients", "a skipped update leaves its gradients for the next", "T4", skip_keeps_gradients),
    Mutant("skip-counts-a-step", "a skipped update counts in the optimizer's state", "T4", skip_counts_a_step),
    Mutant("skip-advances-the-scheduler", "a skipped update advances the scheduler", "T4", skip_advances_the_scheduler),
    Mutant("FC06-one-rank-tells-no-skip", "rank 0 says that a skipped update was applied", "T4",
           one_rank_tells_no_skip, "fsdp", 2),
    Mutant("scheduler-each-micro-batch", "the scheduler advances with each micro-batch", "T5", scheduler_each_micro_batch),
    Mutant("scheduler-forgotten", "the scheduler never advances", "T5", scheduler_forgotten),
    Mutant("FC21-short-window-divided-by-all", "a window cut short is divided by A", "T7 FC21: six",
           short_window_divided_by_all),
    Mutant("flush-ignored", "flush does nothing", "T7 FC21: a window", flush_ignored),
    Mutant("empty-flush-counts", "the flush of an empty window counts as a call", "T7: an empty", empty_flush_counts),
    Mutant("gradients-in-bf16", "gradients add up in bfloat16", "T10: gradients", gradients_in_bf16, "local"),
)  # fmt: skip
