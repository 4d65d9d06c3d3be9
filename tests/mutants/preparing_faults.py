"""Faults of what is trained: optimizers, ``prepare``, averages, precision, memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.record import StrategyRecord
from mutants.mutant import Mutant


def after_making(strategy: StrategyRecord, change: Any) -> StrategyRecord:
    """``change`` is done to each optimizer that is made, or makes another of it."""

    def create_optimizer(model: nn.Module, **kwargs: Any) -> Optimizer:
        optimizer = strategy.create_optimizer(model, **kwargs)
        return change(model, optimizer) or optimizer

    return evolve(strategy, create_optimizer=create_optimizer)


def biases_decay(strategy: StrategyRecord) -> StrategyRecord:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]

    return after_making(strategy, change)


def tied_held_twice(strategy: StrategyRecord) -> StrategyRecord:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0])

    return after_making(strategy, change)


def frozen_held(strategy: StrategyRecord) -> StrategyRecord:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[-1]["params"] += [each for each in model.parameters() if not each.requires_grad]

    return after_making(strategy, change)


def betas_as_a_list(strategy: StrategyRecord) -> StrategyRecord:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["betas"] = list(group["betas"])

    return after_making(strategy, change)


def betas_of_torch(strategy: StrategyRecord) -> StrategyRecord:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["betas"] = (0.9, 0.999)

    return after_making(strategy, change)


def another_epsilon(strategy: StrategyRecord) -> StrategyRecord:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["eps"] = 1e-4

    return after_making(strategy, change)


def adam_without_the_w(strategy: StrategyRecord) -> StrategyRecord:
    return after_making(strategy, lambda model, optimizer: Adam(optimizer.param_groups))


def after_preparing(strategy: StrategyRecord, change: Any) -> StrategyRecord:
    """``change`` makes another of what ``prepare`` gives back."""

    def prepare(*items: Any, **kwargs: Any) -> Any:
        return change(strategy.prepare(*items, **kwargs))

    return evolve(strategy, prepare=prepare)


def order_reversed(strategy: StrategyRecord) -> StrategyRecord:
    return after_preparing(
        strategy, lambda ready: ready[::-1] if isinstance(ready, tuple) and len(ready) > 3 else ready
    )


def none_left_out(strategy: StrategyRecord) -> StrategyRecord:
    def change(ready: Any) -> Any:
        return tuple(each for each in ready if each is not None) if isinstance(ready, tuple) else ready

    return after_preparing(strategy, change)


def one_as_a_tuple(strategy: StrategyRecord) -> StrategyRecord:
    return after_preparing(strategy, lambda ready: ready if isinstance(ready, tuple) else (ready,))


def eval_models_trainable(strategy: StrategyRecord) -> StrategyRecord:
    def change(ready: Any) -> Any:
        for each in ready if isinstance(ready, tuple) else (ready,):
            if isinstance(each, nn.Module):
                each.requires_grad_(True)
        return ready

    return after_preparing(strategy, change)


def prepared_twice(strategy: StrategyRecord) -> StrategyRecord:
    seen: list[nn.Module] = []

    def change(ready: Any) -> Any:
        if isinstance(ready, nn.Module) and any(ready is each for each in seen):
            return copy.deepcopy(ready)
        for each in ready if isinstance(ready, tuple) else ():
            seen.extend(part for part in (each if isinstance(each, tuple) else ()) if isinstance(part, nn.Module))
        return ready

    return after_preparing(strategy, change)


def late_optimizer_holds_copies(strategy: StrategyRecord) -> StrategyRecord:
    """One that is made after ``prepare`` does not hold what is trained."""
    seen: list[nn.Module] = []

    def keep(ready: Any) -> Any:
        seen.extend([ready] if isinstance(ready, nn.Module) else [])
        return ready

    def change(model: nn.Module, optimizer: Optimizer) -> Optimizer | None:
        late = any(model is each for each in seen)
        return AdamW([each.detach().clone() for each in model.parameters()], lr=1e-2) if late else None

    return after_making(after_preparing(strategy, keep), change)


def unchecked_pairs(strategy: StrategyRecord) -> StrategyRecord:
    def prepare(*items: Any, **kwargs: Any) -> Any:
        return items[0] if len(items) == 1 else items

    return evolve(strategy, prepare=prepare)


def unwraps_a_copy(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, unwrap_model=lambda model: copy.deepcopy(strategy.unwrap_model(model)))


def averages_each_call(strategy: StrategyRecord) -> StrategyRecord:
    def moving_average(model: nn.Module, model_ema: nn.Module, beta: float = 0.992) -> None:
        with torch.no_grad():
            for average, parameter in zip(model_ema.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 1 - beta)

    return evolve(strategy, moving_average=moving_average)


def beta_on_the_wrong_side(strategy: StrategyRecord) -> StrategyRecord:
    def moving_average(model: nn.Module, model_ema: nn.Module, beta: float = 0.992) -> None:
        strategy.moving_average(model, model_ema, 1 - beta)

    return evolve(strategy, moving_average=moving_average)


def no_average_after_a_load(strategy: StrategyRecord) -> StrategyRecord:
    loaded: list[object] = []

    def load_ckpt(*args: Any, **kwargs: Any) -> Any:
        loaded.append(args)
        return strategy.load_ckpt(*args, **kwargs)

    def moving_average(model: nn.Module, model_ema: nn.Module, beta: float = 0.992) -> None:
        if not loaded:
            strategy.moving_average(model, model_ema, beta)

    return evolve(strategy, load_ckpt=load_ckpt, moving_average=moving_average)


def reference_is_the_actor(strategy: StrategyRecord) -> StrategyRecord:
    def prepare_models_and_optimizers(*args: Any, **kwargs: Any) -> Any:
        trained, valued, rewards, _ = strategy.prepare_models_and_optimizers(*args, **kwargs)
        return trained, valued, rewards, trained[0]

    return evolve(strategy, prepare_models_and_optimizers=prepare_models_and_optimizers)


def critic_at_the_actors_rate(config: StrategyConfig) -> StrategyConfig:
    return evolve(config, critic_learning_rate=config.actor_learning_rate)


def no_warm_up(config: StrategyConfig) -> StrategyConfig:
    return evolve(config, lr_warmup_ratio=0.0)


def no_bf16(config: StrategyConfig) -> StrategyConfig:
    return evolve(config, bf16=False)


def master_weights_in_bf16(strategy: StrategyRecord) -> StrategyRecord:
    def change(ready: Any) -> Any:
        if strategy.config.bf16:
            ready[0].to(torch.bfloat16)
        return ready

    return after_preparing(strategy, change)


def offload_forgets_the_moments(strategy: StrategyRecord) -> StrategyRecord:
    def maybe_offload_optimizer(optimizer: Any) -> Any:
        optimizer.state.clear()
        return optimizer

    return evolve(strategy, maybe_offload_optimizer=maybe_offload_optimizer)


def offload_begins_a_state(strategy: StrategyRecord) -> StrategyRecord:
    def maybe_offload_optimizer(optimizer: Any) -> Any:
        for group in optimizer.param_groups:
            for each in group["params"]:
                zeros = {"exp_avg": torch.zeros_like(each), "exp_avg_sq": torch.zeros_like(each)}
                optimizer.state.setdefault(each, {"step": torch.tensor(1.0), **zeros})
        return optimizer

    return evolve(strategy, maybe_offload_optimizer=maybe_offload_optimizer)


def offload_not_noted(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, offload_model=lambda model: model)


MUTANTS = (
    Mutant("biases-decay", "biases and norms get weight decay", "T9", biases_decay),
    Mutant("tied-held-twice", "the optimizer holds a parameter twice", "T9", tied_held_twice),
    Mutant("frozen-held", "the optimizer holds what is frozen", "T9", frozen_held),
    Mutant("adam-without-the-w", "Adam is made in place of AdamW", "T9", adam_without_the_w),
    Mutant("FC19-betas-as-a-list", "betas are kept as the list that was given", "C2 FC19", betas_as_a_list),
    Mutant("betas-of-torch", "the configuration's betas are not carried out", "C2 FC19", betas_of_torch),
    Mutant("another-epsilon", "AdamW runs with another epsilon", "T6: an MLP", another_epsilon),
    Mutant("prepare-order-reversed", "prepare gives four items back in the reverse order", "T11: order", order_reversed),
    Mutant("prepare-leaves-none-out", "prepare drops the models that are None", "T11: order", none_left_out),
    Mutant("prepare-one-as-a-tuple", "one item comes back as a tuple", "T11: order", one_as_a_tuple),
    Mutant("eval-models-trainable", "models in eval mode keep their gradients", "T11: order", eval_models_trainable),
    Mutant("prepared-twice", "a prepared model is wrapped again", "T11: order", prepared_twice),
    Mutant("unwraps-a-copy", "unwrap_model gives a copy", "T11: order", unwraps_a_copy),
    Mutant("unchecked-pairs", "the optimizer of another model is taken", "T11: another", unchecked_pairs),
    Mutant("late-optimizer-holds-copies", "an optimizer that is made after prepare updates nothing", "T11: the other",
           late_optimizer_holds_copies),
    Mutant("reference-is-the-actor", "the reference model is the actor, and moves with it", "T11: actor",
           reference_is_the_actor),
    Mutant("critic-at-the-actors-rate", "the critic learns at the actor's rate", "T11: actor",
           configure=critic_at_the_actors_rate),
    Mutant("no-warm-up", "the learning rate is not warmed up", "T11: actor", configure=no_warm_up),
    Mutant("averages-each-call", "the moving average moves with each micro-batch", "T12", averages_each_call),
    Mutant("beta-on-the-wrong-side", "beta weighs the parameter and not the average", "T12", beta_on_the_wrong_side),
    Mutant("no-average-after-a-load", "a load hides the updates that come after it from the average", "T12: an average",
           no_average_after_a_load),
    Mutant("bf16-ignored", "bf16 is taken and nothing computes in it", "T10: forward", base="local", configure=no_bf16),
    Mutant("master-weights-in-bf16", "what is trained is kept in bfloat16", "T10: a thousand",
           master_weights_in_bf16, "local"),
    Mutant("offload-forgets-the-moments", "an offloaded optimizer starts anew", "M1: offload between",
           offload_forgets_the_moments),
    Mutant("FC44-offload-begins-a-state", "offload before the first step counts as one", "M1 FC44",
           offload_begins_a_state),
    Mutant("offload-not-noted", "backward runs on a model that is offloaded", "M1: backward", offload_not_noted),
)  # fmt: skip
