"""What must not type-check: each line needs its ``type: ignore``, or mypy reports the ignore as unused.

Pyright reads the ``pyright: ignore`` comments, and reports unused ones just so in this file.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrft import Strategy, get_strategy
from lightrft.strategy.protocol import GetRank, Ranks
from lightrft.strategy.record import StrategyRecord, bind


def wrong_calls(strategy: Strategy, model: nn.Linear, optimizer: Optimizer, x: Tensor) -> None:
    strategy.all_reduce(x, op="avg")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    strategy.all_reduce("text")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    strategy.all_gather([x])  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    strategy.backward(x, model)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.backward(1.0, model, optimizer)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.optimizer_step(model, optimizer)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.create_optimizer(model, weight_decoy=0.1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.create_optimizer(model, lr="fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.prepare("model")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    strategy.save_ckpt(model, "dir", client_state=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.engine_generate_local(None, prompt_ids=[[1]])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.seed = 3  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    strategy.optimiser_step(optimizer, model)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    strategy.setup_inference_engine(None, "hf", model).close()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]


def wrong_calls_of_the_rest(strategy: Strategy, model: nn.Linear, optimizer: Optimizer, x: Tensor) -> None:
    strategy.setup_distributed(60)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.is_rank_0(0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.get_rank("group")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.print(end="")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.barrier(strategy.device)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.close(force=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.broadcast(x, 0.5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    strategy.prepare_models_and_optimizers(model, None, None, None, None)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    strategy.get_grad_norm(optimizer)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.unwrap_model(optimizer)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.init_model_context("meta")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.setup_dataloader([1, 2], batch_size="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.moving_average(model, beta=0.9)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.load_ckpt(model, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.save_model(model, "dir")  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
    strategy.load_model("dir", model)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.maybe_offload_optimizer(model)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    strategy.maybe_load_optimizer(optimizer, 0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.offload_model(optimizer)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    strategy.reload_model((model, optimizer))  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    strategy.report_memory(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.update_engine_weights(x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    strategy.maybe_sleep_inference_engine(2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.wakeup_inference_engine(level=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    strategy.gather_and_generate(None, [1, 2])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


def wrong_outputs(strategy: Strategy, x: Tensor) -> None:
    number: float = strategy.all_reduce(x)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    whole: int = strategy.all_reduce(1)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    pair: nn.Linear = strategy.prepare((nn.Linear(1, 1), torch.optim.SGD([x])))  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    del number, whole, pair


def scaled(factor: float, value: float) -> float:
    return factor * value


rank: GetRank = bind(scaled, 0.5)  # type: ignore[arg-type]  # pyright: ignore[reportAssignmentType]
bind(scaled, 0.5)("three")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


class WrongRank:
    """One member has another type."""

    def setup_distributed(self, timeout: object = None, num_gpu_per_node: int = 8) -> None: ...
    def is_rank_0(self) -> bool:
        return True

    def get_rank(self) -> str:
        return "0"

    def print(self, *msg: object) -> None: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...


ranks: Ranks = WrongRank()  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
record: StrategyRecord = get_strategy()  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
StrategyRecord(name="half")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
