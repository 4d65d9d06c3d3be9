"""T10 on ``local``: bfloat16 where it computes, fp32 where it remembers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightrft import StrategyConfig
from lightrft.backends import fake, local
from lightrft.strategy.record import StrategyRecord


def bf16_strategy() -> StrategyRecord:
    return local.build(StrategyConfig(bf16=True, train_batch_size=1, max_norm=0.0))


def test_T10_a_thousand_small_updates_are_not_lost() -> None:
    strategy = bf16_strategy()
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    model, optimizer = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1e-5)))
    for _ in range(1000):
        strategy.backward(model(torch.ones(1, 1)).mean(), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).applied
    # bfloat16 has no number between 0.992 and 1: each of these updates alone would be rounded away
    assert abs(model.weight.item() - 0.99) < 1e-4


def test_T10_forward_and_backward_in_bf16_state_in_fp32() -> None:
    strategy = bf16_strategy()
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).bfloat16()
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    model, optimizer = strategy.prepare((model, optimizer))
    output: Tensor = model(torch.randn(3, 4))
    assert output.dtype is torch.bfloat16
    strategy.backward(output.float().square().mean(), model, optimizer)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    strategy.optimizer_step(optimizer, model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_T10_autocast_ends_when_a_forward_fails() -> None:
    model = bf16_strategy().prepare(nn.Linear(4, 2))
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5))
    assert not torch.is_autocast_enabled("cpu")
    assert model(torch.randn(3, 4)).dtype is torch.bfloat16


def test_F2_the_fake_leaves_the_precision_alone() -> None:
    strategy = fake.build(StrategyConfig(bf16=True))
    model = strategy.prepare(nn.Linear(4, 2).double())
    assert model(torch.randn(1, 4).double()).dtype is torch.float64
