"""What the laws look with: small models, batches, a way to read whole parameters through the Protocol, and an oracle.

The oracle is plain torch in one process: it shares no code with the backends that are compared with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer

from lightrft.engines.protocol import Capabilities, Completion, Request, Sampling
from lightrft.errors import EngineError
from lightrft.ops.clipping import local_part
from lightrft.strategy.protocol import StepOutcome, Strategy


def refused(kind: type[Exception], says: str, call: Callable[[], object]) -> None:
    """Raises unless ``call`` raises an error of that kind whose text holds ``says``."""
    try:
        call()
    except kind as error:
        if says not in str(error):
            raise AssertionError(f"the {type(error).__name__} says {error!s}, and not {says!r}") from error
    else:
        raise AssertionError(f"what had to be refused with {kind.__name__} ({says!r}) went through")


def changed_environment(before: Mapping[str, str]) -> list[str]:
    """The environment variables that are other ones than they were; torch's own, with the first optimizer, is not told."""
    names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    return sorted(names - {"TORCHINDUCTOR_CACHE_DIR"})


# --------------------------------------------------------------------------------------------------- models and batches


def line(weight: float = 1.0, bias: float | None = None) -> nn.Linear:
    """y = weight * x (+ bias)."""
    made = nn.Linear(1, 1, bias=bias is not None)
    with torch.no_grad():
        made.weight.fill_(weight)
        if bias is not None:
            made.bias.fill_(bias)
    return made


def column(*values: float) -> Tensor:
    """Inputs of a line, [n, 1]."""
    return torch.tensor(values, dtype=torch.float32)[:, None]


def mlp(seed: int = 0) -> nn.Sequential:
    """Weights, biases and a norm: 78 parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs [n, 4] and targets [n, 2] for :func:`mlp`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator), torch.randn(samples, 2, generator=generator)


def sgd(model: Module, lr: float = 1.0) -> Optimizer:
    """Plain gradient descent: with lr 1, what a parameter loses is its gradient."""
    return SGD(model.parameters(), lr=lr)


# ----------------------------------------------------------------------------------------------------- whole parameters


@define(eq=False)
class Recorder:
    """An engine that keeps the weights it is sent."""

    weights: dict[str, Tensor] = field(factory=dict)
    name: str = "recorder"
    capabilities: Capabilities = Capabilities()
    refuses: bool = False
    """Updates fail after their first weight."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """It does not."""
        raise NotImplementedError("the recorder generates nothing")

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps copies."""
        for name, tensor in named_tensors:
            if self.refuses:
                raise EngineError(f"no room for {name}")
            self.weights[name] = tensor.detach().cpu().clone()

    def flush_cache(self) -> None:
        """Holds none."""

    def sleep(self, level: int = 1) -> None:
        """Has nothing to free."""

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Is awake."""

    def close(self) -> None:
        """Holds nothing."""


def weights(strategy: Strategy, model: Module) -> dict[str, Tensor]:
    """Every parameter, whole, by its name in the plain module: what an inference engine would be sent.

    Where the rollout is null the model is read itself. Every rank has to call it.
    """
    recorder = Recorder()
    if strategy.setup_inference_engine(None, engine_type=recorder) is None:
        return {name: parameter.detach().clone() for name, parameter in strategy.unwrap_model(model).named_parameters()}
    strategy.update_engine_weights(model)
    return recorder.weights


def lost(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """What each parameter lost between the two: after one step of :func:`sgd` with lr 1, its gradient."""
    return {name: before[name] - after[name] for name in before}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bitwise."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def state_of(optimizer: Optimizer) -> list[dict[str, object]]:
    """This rank's part of what an optimizer remembers, as plain values that can be compared."""
    return [
        {key: local_part(value).tolist() if isinstance(value, Tensor) else value for key, value in entry.items()}
        for entry in optimizer.state.values()
    ]


def furthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between two parameters of the same name."""
    assert first.keys() == second.keys(), f"{sorted(first)} and {sorted(second)} are not the same parameters"
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


# ------------------------------------------------------------------------------------------------------------- training


def rows_of(strategy: Strategy, accumulation: int | None = None) -> Iterator[slice]:
    """This rank's rows of a global batch, one micro-batch after another: at each, ranks take consecutive ones."""
    micro, rank, world = strategy.micro_train_batch_size, strategy.get_rank(), strategy.world_size
    for step in range(strategy.accumulated_gradient if accumulation is None else accumulation):
        start = (step * world + rank) * micro
        yield slice(start, start + micro)


def update(
    strategy: Strategy,
    model: Module,
    optimizer: Optimizer,
    data: tuple[Tensor, Tensor],
    *,
    scale: float = 1.0,
) -> StepOutcome:
    """One window over a global batch; the outcome of its last step."""
    outcome = None
    x, y = data
    for rows in rows_of(strategy):
        strategy.backward(mse_loss(model(x[rows]), y[rows]) * scale, model, optimizer)
        outcome = strategy.optimizer_step(optimizer, model)
    assert outcome is not None
    return outcome


def trained_by_torch(
    model: Module,
    losses: Iterable[Callable[[Module], Tensor]],
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    max_norm: float = 1.0,
) -> tuple[dict[str, Tensor], list[float]]:
    """The oracle: one AdamW update for each loss over a whole batch. Parameters at the end, norms before clipping."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=lr, betas=betas)
    norms = []
    for loss in losses:
        optimizer.zero_grad()
        torch.autograd.backward(loss(model))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def close_to(value: float, expected: float, tolerance: float = 1e-6) -> None:
    """Raises where it is not."""
    assert abs(value - expected) <= tolerance, f"{value} is not {expected} within {tolerance}"


def weight(strategy: Strategy, model: Module) -> float:
    """The one of a line."""
    return float(weights(strategy, model)["weight"])
