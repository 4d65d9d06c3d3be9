"""``prepare`` and ``prepare_models_and_optimizers``: what is the same whatever a backend makes of a model (T11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

import torch
from attrs import frozen
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.ops.accumulation import trained_model
from lightrft.ops.optimizers import create_optimizer
from lightrft.ops.schedulers import cosine_with_warmup
from lightrft.strategy.protocol import (
    CriticT,
    Item2T,
    Item3T,
    Item4T,
    ItemT,
    ModelT,
    PrepareItem,
)
from lightrft.strategy.record import RunState


class PrepareModel(Protocol):
    """Makes a model ready: what a backend brings. One that is ready already comes back as it is."""

    def __call__(self, state: RunState, model: ModelT, optimizer: Optimizer | None) -> ModelT: ...


def leave_as_is(state: RunState, model: ModelT, optimizer: Optimizer | None) -> ModelT:
    """What the fake does with a model."""
    return model


@frozen(eq=False)
class PrepareEach:
    """``prepare``: every item by itself, in order."""

    state: RunState
    prepare_model: PrepareModel

    @overload
    def __call__(self, item: ItemT, /, *, is_rlhf: bool = False) -> ItemT: ...
    @overload
    def __call__(self, item: ItemT, item2: Item2T, /, *, is_rlhf: bool = False) -> tuple[ItemT, Item2T]: ...
    @overload
    def __call__(
        self, item: ItemT, item2: Item2T, item3: Item3T, /, *, is_rlhf: bool = False
    ) -> tuple[ItemT, Item2T, Item3T]: ...
    @overload
    def __call__(
        self, item: ItemT, item2: Item2T, item3: Item3T, item4: Item4T, /, *, is_rlhf: bool = False
    ) -> tuple[ItemT, Item2T, Item3T, Item4T]: ...
    @overload
    def __call__(
        self, *models_or_model_optim_pairs: PrepareItem, is_rlhf: bool = False
    ) -> PrepareItem | tuple[PrepareItem, ...]: ...
    def __call__(self, *models_or_model_optim_pairs: PrepareItem, is_rlhf: bool = False) -> object:
        # Everything is looked at before anything is changed: a rank that raises in the middle would leave the others.
        for position, item in enumerate(models_or_model_optim_pairs):
            check_item(position, item)
        prepared = tuple(self._one(item) for item in models_or_model_optim_pairs)
        return prepared[0] if len(prepared) == 1 else prepared

    def _one(self, item: PrepareItem) -> PrepareItem:
        if item is None:
            return None
        if isinstance(item, Module):
            if not item.training:
                item.requires_grad_(False)
            return self.prepare_model(self.state, item, None)
        model, optimizer, *scheduler = item
        known = trained_model(self.state, model)
        known.optimizer = optimizer
        known.scheduler = scheduler[0] if scheduler else known.scheduler
        ready = self.prepare_model(self.state, model, optimizer)
        if ready is model:
            return item
        if optimizer is None:
            return ready, None
        return (ready, optimizer, scheduler[0]) if scheduler else (ready, optimizer)


def check_item(position: int, item: object) -> None:
    """Refuses what ``prepare`` does not take, naming which argument it was."""
    if item is None:
        return
    if isinstance(item, Module):
        check_devices(position, item)
        return
    kinds = (Module, Optimizer | None, LRScheduler | None)
    if isinstance(item, tuple) and 2 <= len(item) <= 3 and all(map(isinstance, item, kinds)):
        model, optimizer = item[:2]
        check_devices(position, model)
        if isinstance(optimizer, Optimizer):
            check_optimizer(position, model, optimizer)
        return
    raise TypeError(
        f"prepare: argument {position} is a {type(item).__name__}. Pass a model, (model, optimizer), "
        f"(model, optimizer, scheduler) or None."
    )


def check_devices(position: int, model: Module) -> None:
    """Refuses a model in pieces: where it is to be, no backend can guess."""
    examples: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        examples.setdefault(parameter.device, name)
    if len(examples) > 1:
        seen = ", ".join(f"{name} on {device}" for device, name in examples.items())
        raise ValueError(
            f"prepare: the parameters of argument {position} lie on different devices: {seen}. Put the model on one of "
            f"them first; for one made without memory, make all of it under init_model_context(meta_init=True)."
        )


def check_optimizer(position: int, model: Module, optimizer: Optimizer) -> None:
    """Refuses an optimizer of another model: it would never update this one."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        raise ValueError(
            f"prepare: the optimizer of argument {position} holds {foreign} parameters that its model does not have. "
            f"Make it with strategy.create_optimizer(model) from this model."
        )


@frozen(eq=False)
class PrepareRun:
    """``prepare_models_and_optimizers``: the models of an RLHF run, on top of ``prepare``."""

    state: RunState
    prepare: PrepareEach

    @overload
    def __call__(
        self,
        actor: ModelT,
        critic: None,
        reward_models: Sequence[Module] | Module | None,
        initial_model: Module | None,
        args: object,
        max_steps: int,
    ) -> tuple[
        tuple[ModelT, Optimizer, LRScheduler], tuple[None, None, None], Sequence[Module] | Module | None, Module | None
    ]: ...
    @overload
    def __call__(
        self,
        actor: ModelT,
        critic: CriticT,
        reward_models: Sequence[Module] | Module | None,
        initial_model: Module | None,
        args: object,
        max_steps: int,
    ) -> tuple[
        tuple[ModelT, Optimizer, LRScheduler],
        tuple[CriticT, Optimizer, LRScheduler],
        Sequence[Module] | Module | None,
        Module | None,
    ]: ...
    def __call__(
        self,
        actor: Module,
        critic: Module | None,
        reward_models: Sequence[Module] | Module | None,
        initial_model: Module | None,
        args: object,
        max_steps: int,
    ) -> object:
        config = self.state.config
        trained_actor = self._trained(actor, config.actor_learning_rate, max_steps)
        trained_critic: object = (None, None, None)
        if critic is not None:
            trained_critic = self._trained(critic, config.critic_learning_rate, max_steps)
        frozen_rewards: Sequence[Module] | Module | None = None
        if isinstance(reward_models, Module):
            frozen_rewards = self._frozen(reward_models)
        elif reward_models is not None:
            frozen_rewards = [self._frozen(model) for model in reward_models]
        reference = None if initial_model is None else self._frozen(initial_model)
        return trained_actor, trained_critic, frozen_rewards, reference

    def _trained(self, model: Module, learning_rate: float, max_steps: int) -> tuple[Module, Optimizer, LRScheduler]:
        optimizer = create_optimizer(self.state, model, lr=learning_rate)
        scheduler = cosine_with_warmup(self.state.config, optimizer, max_steps)
        return self.prepare((model, optimizer, scheduler))

    def _frozen(self, model: Module) -> Module:
        return self.prepare(model.eval())
