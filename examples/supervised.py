"""Learns XOR of two signs: a plain training loop, on any backend.

python examples/supervised.py
torchrun --nproc-per-node 2 examples/supervised.py --backend fsdp
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightrft import Strategy, get_strategy


def batches(strategy: Strategy, updates: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches: points in the square, and whether their coordinates have different signs."""
    generator = torch.Generator().manual_seed(strategy.seed + strategy.get_rank())
    for _ in range(updates * strategy.accumulated_gradient):
        points = torch.rand(strategy.micro_train_batch_size, 2, generator=generator) * 2 - 1
        yield points.to(strategy.device), (points.prod(dim=1) < 0).float().to(strategy.device)


def train(strategy: Strategy, updates: int) -> float:
    """Returns the share of the last update's points that were told right."""
    with strategy.init_model_context():
        plain = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(strategy.device)
    model, optimizer = strategy.prepare((plain, strategy.create_optimizer(plain, lr=0.03)))
    losses: list[float] = []
    right: list[float] = []
    update, accuracy = 0, 0.0
    for points, labels in batches(strategy, updates):
        logits = model(points).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        strategy.backward(loss, model, optimizer)  # the mean over this micro-batch: the strategy divides
        outcome = strategy.optimizer_step(optimizer, model)
        losses.append(loss.item())
        right.append(((logits > 0) == labels.bool()).float().mean().item())
        if outcome.grad_norm is None:  # no update yet: more micro-batches are to come
            continue
        update += 1
        means = strategy.all_reduce({"loss": sum(losses) / len(losses), "accuracy": sum(right) / len(right)})
        accuracy = means["accuracy"]
        if update % 20 == 0:
            strategy.print(f"{update:4} loss {means['loss']:.3f} accuracy {accuracy:.2f} norm {outcome.grad_norm:.2f}")
        losses, right = [], []
    return accuracy


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--train_batch_size", type=int, default=64)
    parser.add_argument("--micro_train_batch_size", type=int, default=16)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    strategy = get_strategy(args)
    strategy.setup_distributed()
    try:
        accuracy = train(strategy, args.updates)
        strategy.print(f"accuracy {accuracy:.2f}")
    finally:
        strategy.close()


if __name__ == "__main__":
    main()
