"""Training where the model need not be prepared: what the laws of ``lightrft.conformance`` leave to backends of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightrft.strategy.record import StrategyRecord
from support import MakeStrategy


class Line(nn.Module):
    """y = w * x."""

    def __init__(self, w: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator), torch.randn(samples, 2, generator=generator)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_T9_refuses_unknown_keywords_and_nothing_to_train(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    with pytest.raises(TypeError, match="weight_decoy"):
        strategy.create_optimizer(mlp(), weight_decoy=0.1)  # type: ignore[call-arg]  # pyright: ignore
    with pytest.raises(ValueError, match="without trainable parameters"):
        strategy.create_optimizer(mlp().requires_grad_(False))


def test_FC19_betas_are_exactly_a_tuple_of_floats(make_strategy: MakeStrategy) -> None:
    import numpy as np

    strategy = make_strategy(train_batch_size=1, adam_betas=[0.8, 0.9])
    for betas in ([0.8, 0.9], np.array([0.8, 0.9]), (0.8, 0.9)):
        optimizer = strategy.create_optimizer(mlp(), betas=betas)  # type: ignore[arg-type]  # pyright: ignore
        found = optimizer.param_groups[0]["betas"]
        assert type(found) is tuple
        assert [type(value) for value in found] == [float, float]
        assert found == (0.8, 0.9)
    assert type(strategy.create_optimizer(mlp()).param_groups[0]["betas"]) is tuple


def test_T11_is_not_wrapped_twice(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1, bf16=True)
    model = strategy.prepare(mlp())
    hooks = len(model._forward_hooks)
    strategy.prepare(model)
    assert len(model._forward_hooks) == hooks


def test_T11_either_order_of_calls(make_strategy: MakeStrategy) -> None:
    results = []
    for prepare_first in (False, True):
        strategy = make_strategy(train_batch_size=1)
        model = mlp()
        if prepare_first:
            model = strategy.prepare(model)
            optimizer = strategy.create_optimizer(model, lr=1e-2)
        else:
            model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
        x, y = batch(1)
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).applied
        results.append(parameters(model))
    assert same(*results)


class Wrapper(nn.Module):
    """As engines and actor classes hold a model."""

    def __init__(self, **inner: nn.Module) -> None:
        super().__init__()
        for name, module in inner.items():
            setattr(self, name, module)


def test_T12_unwraps_engines_compiled_modules_and_actors(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    user = mlp()
    assert strategy.unwrap_model(user) is user
    assert strategy.unwrap_model(Wrapper(module=user)) is user
    assert strategy.unwrap_model(Wrapper(module=Wrapper(model=user))) is user
    assert strategy.unwrap_model(cast(nn.Module, torch.compile(user))) is user
    critic = Wrapper(model=user, head=nn.Linear(2, 1))
    assert strategy.unwrap_model(critic) is critic


def test_T12_moving_average_of_a_model_trained_elsewhere(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy()
    model, average = Line(1.0), Line(0.0)
    strategy.moving_average(model, average, 0.75)
    assert average.w.item() == pytest.approx(0.25)


def test_FC44_offload_before_the_first_step(make_strategy: MakeStrategy) -> None:
    results = []
    for offload in (False, True):
        strategy = make_strategy(train_batch_size=1)
        model = mlp()
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        if offload:
            assert strategy.maybe_offload_optimizer(optimizer) is optimizer
            assert strategy.maybe_load_optimizer(optimizer) is optimizer
        x, y = batch(1)
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        strategy.optimizer_step(optimizer, model)
        results.append(parameters(model))
    assert same(*results)


def test_get_grad_norm_now_and_of_the_last_update(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    model = Line(0.0)
    optimizer = sgd(model)
    strategy.backward(model(torch.tensor([-7.0])).mean(), model, optimizer)
    assert strategy.get_grad_norm(model) == pytest.approx(7.0)
    strategy.optimizer_step(optimizer, model)
    assert strategy.get_grad_norm(model) == pytest.approx(7.0)


def train_some(strategy: StrategyRecord, model: nn.Module, steps: int) -> list[Tensor]:
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    for step in range(steps):
        x, y = batch(4, step)
        strategy.backward(mse_loss(model(x).float(), y), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).applied
    return parameters(model)
