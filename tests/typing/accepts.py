"""What must type-check, under mypy --strict and pyright. Never run: read by the checkers alone."""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import assert_type

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft import FakeStrategy, StepOutcome, Strategy, StrategyConfig, get_fake_strategy, get_strategy
from lightrft.backends import fake, local
from lightrft.engines.protocol import Completion, Engine, Sampling
from lightrft.engines.scripted import scripted
from lightrft.strategy.protocol import BuildStrategy, Collectives, Facts, MemoryReport, PretrainedTokenizer, Ranks
from lightrft.strategy.record import StrategyRecord, bind

builders: list[BuildStrategy] = [fake.build, local.build]
built: Strategy = local.build(StrategyConfig())
from_args: Strategy = get_strategy(Namespace(backend="local"))
faked: Strategy = get_fake_strategy()
constructed: Strategy = FakeStrategy(seed=1, max_norm=0.5, micro_train_batch_size=1, train_batch_size=8, args=None)
engine: Engine = scripted()


def log_metrics(strategy: Collectives, loss: Tensor) -> float:
    """A function asks for the least that it needs."""
    return strategy.all_reduce(float(loss))


def outputs_follow_inputs(strategy: Strategy, x: Tensor) -> None:
    assert_type(strategy.all_reduce(x), Tensor)
    assert_type(strategy.all_reduce({"a": x}, "max"), dict[str, Tensor])
    assert_type(strategy.all_reduce(1, "sum"), int)
    assert_type(strategy.all_reduce(1), float)
    assert_type(strategy.all_reduce({"loss": 1.0}), dict[str, float])
    assert_type(strategy.all_gather(x), list[Tensor])
    assert_type(strategy.all_gather({"a": x}), dict[str, list[Tensor]])
    assert_type(strategy.broadcast(x, src=0), Tensor)
    log_metrics(strategy, x)


def training(strategy: Strategy, model: nn.Linear, critic: nn.Sequential, scheduler: LRScheduler) -> None:
    optimizer = strategy.create_optimizer(model, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    assert_type(optimizer, Optimizer)
    assert_type(strategy.prepare(model), nn.Linear)
    assert_type(strategy.prepare(None), None)
    assert_type(strategy.prepare((model, optimizer)), tuple[nn.Linear, Optimizer])
    assert_type(strategy.prepare((model, optimizer, scheduler)), tuple[nn.Linear, Optimizer, LRScheduler])
    assert_type(
        strategy.prepare((model, optimizer), critic, is_rlhf=True), tuple[tuple[nn.Linear, Optimizer], nn.Sequential]
    )
    strategy.backward(model(torch.ones(1)).mean(), model, optimizer)
    outcome = strategy.optimizer_step(optimizer, model, scheduler, name="actor", flush=True)
    assert_type(outcome, StepOutcome)
    assert_type(outcome.grad_norm, float | None)
    (actor, actor_optim, actor_scheduler), (no_critic, _, _), _, _ = strategy.prepare_models_and_optimizers(
        model, None, None, None, strategy.args, 10
    )
    assert_type(actor, nn.Linear)
    assert_type(actor_optim, Optimizer)
    assert_type(actor_scheduler, LRScheduler)
    assert_type(no_critic, None)
    assert_type(strategy.unwrap_model(model), nn.Module)
    assert_type(strategy.init_model_context(), AbstractContextManager[None])
    strategy.moving_average(model, critic, beta=0.99)


def the_rest(strategy: Strategy, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    strategy.save_ckpt(model, "checkpoints", client_state={"step": 3})
    path, client_state = strategy.load_ckpt(model, "checkpoints")
    assert_type(path, str)
    assert_type(client_state, dict[str, object])
    assert_type(strategy.maybe_offload_optimizer(optimizer), torch.optim.AdamW)
    assert_type(strategy.setup_inference_engine(None, "hf", model), Engine | None)
    strategy.setup_inference_engine(None, engine)
    completions = strategy.gather_and_generate({"max_new_tokens": 4}, all_prompt_token_ids=[[1, 2]])
    assert_type(completions, list[Completion])
    assert_type(strategy.is_rank_0(), bool)
    assert_type(strategy.seed, int)


def ranks_meet(strategy: Strategy, timeout: timedelta) -> None:
    strategy.setup_distributed(timeout, num_gpu_per_node=4)
    strategy.print("step", 3, None)
    strategy.barrier()
    assert_type(strategy.get_rank(), int)
    strategy.close()


def models_and_memory(
    strategy: Strategy, model: nn.Linear, optimizer: torch.optim.AdamW, tokenizer: PretrainedTokenizer, path: Path
) -> None:
    assert_type(strategy.get_grad_norm(model), float)
    assert_type(strategy.setup_dataloader([1, 2], 2, collate_fn=sum), torch.utils.data.DataLoader[int])
    strategy.save_model(model, tokenizer, path, safe_serialization=True)
    strategy.save_model(model, None, "model")
    strategy.load_model(model, path, "cpu", strict=True, key_replace_fn=dict)
    assert_type(strategy.maybe_load_optimizer(optimizer, "cpu"), torch.optim.AdamW)
    assert_type(strategy.offload_model(model), nn.Linear)
    assert_type(strategy.reload_model(model), nn.Linear)
    assert_type(strategy.report_memory("after loading"), MemoryReport)
    assert_type(strategy.report_memory().device_peak, int | None)


def rollouts(strategy: Strategy, model: nn.Module) -> None:
    strategy.update_engine_weights(model)
    strategy.maybe_sleep_inference_engine()
    strategy.wakeup_inference_engine()
    completions = strategy.engine_generate_local(Sampling(n=2), prompt_token_ids=[(1, 2)])
    assert_type(completions, list[Completion])
    assert_type(completions[0].logprobs, tuple[float, ...] | None)


def half(scale: float, value: float) -> float:
    return scale * value


assert_type(bind(half, 0.5)(3.0), float)


def swapped(strategy: StrategyRecord) -> StrategyRecord:
    def rank() -> int:
        return 1

    return evolve(strategy, get_rank=rank)


class WithMethods:
    """A third party may write an ordinary class."""

    name = "theirs"

    def setup_distributed(self, timeout: object = None, num_gpu_per_node: int = 8) -> None: ...
    def is_rank_0(self) -> bool:
        return True

    def get_rank(self) -> int:
        return 0

    def print(self, *msg: object) -> None: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...


ranks: Ranks = WithMethods()


def needs_facts(strategy: Facts) -> int:
    return strategy.train_batch_size


needs_facts(built)
