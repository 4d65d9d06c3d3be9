"""Laws of our own, in the shape of lightrft's: ranks that use other parts of a model, backwards that DDP lets pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightrft.conformance.law import Law, Make
from lightrft.conformance.probes import close_to, lost, refused, weights
from lightrft.errors import UnsupportedOperation
from lightrft.strategy.protocol import Strategy
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


class Branches(nn.Module):
    """Two weights, of which a forward uses those that it is told: the gradient of each is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: float, use: str = "ab") -> Tensor:
        used = [weight * x for name, weight in (("a", self.a), ("b", self.b)) if name in use]
        return torch.stack(used).sum()


def prepared(make: Make, accumulation: int) -> tuple[Strategy, nn.Module, Optimizer]:
    strategy = make(train_batch_size=accumulation * make().world_size, max_norm=0.0)
    model = Branches()
    return strategy, *strategy.prepare((model, SGD(model.parameters(), lr=1.0)))


def gradients(
    strategy: Strategy, model: nn.Module, optimizer: Optimizer, losses: Iterable[Tensor]
) -> tuple[float, float]:
    """Those of ``a`` and ``b`` over a window, the same on every rank. Each loss is asked for when it is needed."""
    before = weights(strategy, model)
    for loss in losses:
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model)
    moved = lost(before, weights(strategy, model))
    for value in moved.values():
        assert all(torch.equal(value, other) for other in strategy.all_gather(value)), "the ranks went apart"
    return float(moved["a"]), float(moved["b"])


def what_one_rank_uses(make: Make) -> None:
    strategy, model, optimizer = prepared(make, 2)
    use = "ab" if strategy.is_rank_0() else "a"
    plain = strategy.unwrap_model(model)
    for losses in ((model(1.0, use) for _ in range(2)), (plain(1.0, use) for _ in range(2))):
        a, b = gradients(strategy, model, optimizer, losses)
        close_to(a, 1.0)
        close_to(b, 1.0 / strategy.world_size)


def what_no_rank_uses(make: Make) -> None:
    strategy, model, optimizer = prepared(make, 1)
    plain = strategy.unwrap_model(model)
    for forward in (model, plain):
        strategy.backward(forward(1.0, "a"), model, optimizer)
        assert [name for name, parameter in plain.named_parameters() if parameter.grad is not None] == ["a"]
        strategy.optimizer_step(optimizer, model)


def more_than_the_latest_forward_used(make: Make) -> None:
    strategy, model, optimizer = prepared(make, 1)
    loss = model(1.0, "a") + model(1.0, "b")
    refused(UnsupportedOperation, "backend 'ddp'", lambda: strategy.backward(loss, model, optimizer))


LAWS_OF_DDP = (
    Law("T1: what one rank uses moves on all", what_one_rank_uses),
    Law("T1: what no rank uses gets no gradient", what_no_rank_uses),
    Law("S2: a backward into more than the latest forward used is refused", more_than_the_latest_forward_used),
)
