"""``backward`` + ``optimizer_step`` against the same lines in raw torch, in one process, turn by turn."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import mse_loss

from benchmarks.figures import Figure, alternate, milliseconds, paired_ratio
from lightrft import StrategyConfig
from lightrft.backends.local import build

TARGET = 1.02
ACCUMULATION = 4


def network(width: int, depth: int = 4) -> nn.Module:
    """An MLP of about depth * width**2 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())])


def through_strategy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """One update through the strategy."""
    config = StrategyConfig(bf16=False, train_batch_size=ACCUMULATION * len(x), micro_train_batch_size=len(x))
    strategy = build(config)
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-4)))

    def update() -> None:
        for _ in range(ACCUMULATION):
            strategy.backward(mse_loss(model(x), y), model, optimizer)
            strategy.optimizer_step(optimizer, model)

    return update


def in_raw_torch(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """The same update, as one writes it by hand."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    undecayed = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.0}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95))

    def update() -> None:
        for _ in range(ACCUMULATION):
            torch.autograd.backward(mse_loss(model(x), y) / ACCUMULATION)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def measure(rounds: int = 60) -> list[Figure]:
    """At 1 and at 16 million parameters."""
    figures = []
    for millions, width in ((1, 512), (16, 2048)):
        model, x = network(width), torch.randn(16, width)
        y = torch.randn_like(x)
        ours, rival = alternate(
            [through_strategy(copy.deepcopy(model), x, y), in_raw_torch(copy.deepcopy(model), x, y)], rounds
        )
        ratio = paired_ratio(ours, rival)
        figures.append(
            Figure(
                name=f"backward x {ACCUMULATION} + optimizer_step, {millions} M parameters (rival: raw torch)",
                ours=milliseconds(ours),
                rival=milliseconds(rival),
                ratio=ratio,
                target=f"<= {TARGET}",
                met=ratio <= TARGET,
            )
        )
    return figures
