"""Laws about parts of a model that some micro-batches do not use, or that are frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightrft.conformance.law import Law, Make
from lightrft.conformance.probes import column, line, same, sgd, weights


def branches() -> nn.Module:
    """Two lines, of which a forward uses those that it is told."""
    a_line, b_line = line(1.0), line(1.0)

    def forward(x: Tensor, a: bool = True, b: bool = True) -> Tensor:
        return (a_line(x) if a else x * 0.0) + (b_line(x) if b else x * 0.0)

    made = nn.Identity()  # a module by composition: one that may have another forward and parts
    made.a, made.b, made.forward = a_line, b_line, forward  # type: ignore[assignment]  # of an instance
    return made


def an_unused_part_stays(make: Make) -> None:
    strategy = make(train_batch_size=2 * make().world_size, max_norm=0.0)
    model = branches()
    model, optimizer = strategy.prepare((model, sgd(model)))
    seen = []
    for first, second in ((True, True), (True, False), (False, True)):
        for b in (first, second):
            strategy.backward(model(column(2.0), b=b).mean(), model, optimizer)
            strategy.optimizer_step(optimizer, model)
        seen.append({name: float(value) for name, value in weights(strategy, model).items()})
    expected = [
        {"a.weight": -1.0, "b.weight": -1.0},
        {"a.weight": -3.0, "b.weight": -2.0},  # b was in one of the two micro-batches
        {"a.weight": -5.0, "b.weight": -3.0},
    ]
    assert seen == expected, f"{seen} is not {expected}"
    for _ in range(2):
        strategy.backward(model(column(2.0), b=False).mean(), model, optimizer)
        strategy.optimizer_step(optimizer, model)
    found = {name: float(value) for name, value in weights(strategy, model).items()}
    assert found == {"a.weight": -7.0, "b.weight": -3.0}, "what no micro-batch used moved"


def frozen_parts_stay(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size, max_norm=0.0)
    model = branches()
    model.get_submodule("b").requires_grad_(False)
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=0.1, weight_decay=0.5)))
    for _ in range(3):
        strategy.backward(model(column(2.0)).mean(), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).applied
    average = strategy.prepare(branches().eval())
    strategy.moving_average(model, average, beta=0.0)
    found = weights(strategy, model)
    assert same(found, weights(strategy, average)), "an average of beta 0 is not the model"
    assert torch.equal(found["b.weight"], torch.ones(1, 1)), "a frozen parameter moved"
    assert float(found["a.weight"]) < 0.9


LAWS = (
    Law("T1: what no micro-batch used does not move", an_unused_part_stays),
    Law("T9: what is frozen does not move", frozen_parts_stay),
)
