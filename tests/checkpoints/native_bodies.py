"""What the ranks of test_deepspeed_native.py do: DeepSpeed saves, by itself."""

from __future__ import annotations

import logging
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, cast

import torch
from attrs import frozen
from torch import Tensor, nn

from lightrft.backends import deepspeed as backend
from lightrft.conformance.law import Make, run_body
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import BuildStrategy


@frozen
class Told:
    """By parameter name."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]


class Tied(nn.Module):
    """Odd sizes, so that pieces are padded; a tied weight, a frozen one, and buffers, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.fixed = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.fixed.weight.requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor([1.5, 2.0, 0.75, 3.0, 1.0]))
        self.register_buffer("seen", torch.tensor(2**40 + 1))

    def forward(self, ids: Tensor) -> Tensor:
        scaled = self.scale * self.norm(self.embed(ids))  # buffers stay in fp32
        return torch.as_tensor(self.head(self.fixed(scaled.to(self.fixed.weight.dtype)))).square().mean()


def save_natively(directory: Path, stage: int, bf16: bool, steps: int, client_state: dict[str, object]) -> Told:
    """Trains, saves with the engine's own save_checkpoint, and returns what DeepSpeed says the fp32 values are."""
    from torch import distributed as dist

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = StrategyConfig.from_args(
        {
            "backend": "deepspeed",
            "zero_stage": stage,
            "bf16": bf16,
            "micro_train_batch_size": 1,
            "train_batch_size": world_size,
        }
    )
    strategy = backend.build(config)
    strategy.setup_distributed()
    model = Tied()
    optimizer = strategy.create_optimizer(model, lr=0.05, weight_decay=0.1)
    engine, optimizer = strategy.prepare((model, optimizer))
    for step in range(steps):
        ids = torch.arange(6) * (step + 1 + strategy.get_rank()) % 7
        strategy.backward(engine(ids), engine, optimizer)
        strategy.optimizer_step(optimizer, engine)
    save = getattr(engine, "save_checkpoint")  # noqa: B009
    save(str(directory), tag="global_step3", client_state=client_state)
    found = fp32_values(engine, stage, steps > 0)
    strategy.close()
    return found


def loaded_and_saved(build: BuildStrategy, fields: dict[str, object], native: Path, portable: Path) -> list[str]:
    """Another strategy loads what DeepSpeed saved, and saves it as its own; returns what the log of this rank said."""
    said: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = QueueHandler(said)
    logger = logging.getLogger("lightrft.checkpoints.state")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def body(make: Make) -> None:
        strategy = make(**fields)
        model = Tied()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-1.0)
        optimizer = strategy.create_optimizer(model, lr=0.05, weight_decay=0.1)
        prepared, optimizer = strategy.prepare((model, optimizer))
        path, client_state = strategy.load_ckpt(prepared, native, optimizer=optimizer)
        assert path == str(native / "global_step3")
        assert client_state == {}
        strategy.save_ckpt(prepared, portable, optimizer=optimizer)

    try:
        run_body(build, {}, body, {})
    finally:
        logger.removeHandler(handler)
    return [said.get().getMessage() for _ in range(said.qsize())]


def fp32_values(engine: nn.Module, stage: int, trained: bool) -> Told:
    """By DeepSpeed's documented functions."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if stage in (1, 2):  # it links them once, before there are any
        linked = cast(_Linked, engine.optimizer)
        linked._hp_optimizer_states_linked = False
        linked._lazy_init_hp_params_optimizer_state()
    module = cast(nn.Module, engine.module)
    weights: dict[str, Tensor] = {
        name: buffer.float() if buffer.is_floating_point() else buffer.clone()
        for name, buffer in module.named_buffers()
    }
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        if stage == 0 or not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter]) if stage == 3 else torch.no_grad():
                weights[name] = parameter.detach().clone().float()
            continue
        value = safe_get_full_fp32_param(parameter)
        assert value is not None
        weights[name] = value.detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            moment = safe_get_full_optimizer_state(parameter, key) if trained else None
            if moment is not None:
                moments.setdefault(name, {})[key] = moment.detach().clone()
    return Told(weights, moments)


class _Linked(Protocol):
    _hp_optimizer_states_linked: bool

    def _lazy_init_hp_params_optimizer_state(self) -> None: ...
