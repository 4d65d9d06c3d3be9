"""A backend as a value: one frozen record whose fields are functions, and ``bind``, by which the functions get their state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from attrs import define, evolve, field, frozen

from lightrft.strategy import protocol
from lightrft.strategy.config import StrategyConfig, accumulated_gradient

if TYPE_CHECKING:
    from threading import Thread
    from weakref import ReferenceType

    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.engines.protocol import Engine
    from lightrft.ops.data import EpochSampler
    from lightrft.ops.world import World

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


@frozen
class Bound(Generic[S, P, R]):
    """A function together with its first argument: exact to both type checkers, picklable, equal by value."""

    fn: Callable[Concatenate[S, P], R]
    state: S

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(self.state, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """What ``help`` and ``inspect.signature`` show: the function's own, less its first parameter."""
        full = inspect.signature(self.fn)
        return full.replace(parameters=list(full.parameters.values())[1:])


def bind(fn: Callable[Concatenate[S, P], R], state: S, /) -> Bound[S, P, R]:
    """``fn`` with ``state`` as its first argument.

    Use it in place of ``functools.partial``, which lets a function of a wrong signature pass both type checkers.
    """
    return Bound(fn, state)


@define
class Window:
    """The accumulation of one optimizer: what happened since its last update."""

    calls: int = 0
    """Calls of ``optimizer_step``."""
    micro_batches: int = 0
    """Calls of ``backward``."""
    updates: int = 0
    """Applied updates since the optimizer was made; loading a checkpoint sets it to that one's."""
    applied_here: int = 0
    """Those of this process, whatever was loaded."""

    def restart(self) -> None:
        """Begins the next window."""
        self.calls = self.micro_batches = 0


@define
class EngineState:
    """The engine of a run and what it is doing."""

    engine: Engine | None = None
    asleep: bool = False
    said_no_sleep: bool = False
    """The one warning about an engine that cannot sleep was given."""
    rollouts: int = 0
    weight_version: int = 0
    """How many updates of its weights have come."""


@define(eq=False)
class TrainedModel:
    """What goes with a model: for checkpoints that are asked for by model alone."""

    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    grad_norm: float = 0.0
    group_names: list[list[str]] = field(factory=list)
    """For each group of the optimizer the names of its parameters, where it no longer holds the parameters themselves."""
    averaged_at: WeakKeyDictionary[Module, int] = field(factory=WeakKeyDictionary)
    """For each moving average, how many of this process's updates it has seen."""


@frozen
class Peer:
    """The process of a rank."""

    host: str
    pid: int


@frozen(eq=False)
class PendingSave:
    """A checkpoint that a thread is writing."""

    thread: Thread
    failures: list[Exception]


@define(eq=False)
class RunState:
    """Everything that changes while a strategy runs: made by ``build``, first parameter of each function that changes it."""

    config: StrategyConfig
    world: World
    device: torch.device
    accumulated_gradient: int
    windows: WeakKeyDictionary[Optimizer, Window] = field(factory=WeakKeyDictionary)
    trained: WeakKeyDictionary[Module, TrainedModel] = field(factory=WeakKeyDictionary)
    prepared: WeakSet[Module] = field(factory=WeakSet)
    engines: WeakKeyDictionary[Module, Module] = field(factory=WeakKeyDictionary)
    """What drives a model, where that is not the model itself."""
    window_markers: WeakKeyDictionary[Optimizer, Parameter] = field(factory=WeakKeyDictionary)
    """In each optimizer whose window is open, where gradients are not its parameters' own."""
    offloaded: WeakSet[Module] = field(factory=WeakSet)
    engine: EngineState = field(factory=EngineState)
    samplers: list[ReferenceType[EpochSampler]] = field(factory=list)
    """Of the data loaders, as long as they are in use: checkpoints hold how far they are."""
    models_initialised: int = 0
    models_filled: int = 0
    """Those that were made without memory and have got it since."""
    is_set_up: bool = False
    owns_process_group: bool = False
    mesh: DeviceMesh | None = None
    """How the ranks share a model: one dimension, or replicate x shard."""
    pending_save: PendingSave | None = None
    save_buffers: list[Tensor] = field(factory=list)
    """What a save in the background copies into, kept for the next one."""
    save_dirs: dict[Path, int] = field(factory=dict)
    """The directories that this run saves into, and for each the open file whose lock keeps other runs out."""
    peers: Sequence[Peer] = ()
    """Where each rank runs, to say which one is gone."""


@frozen(kw_only=True, eq=False)
class StrategyRecord:
    """A strategy. Every backend is a value of this one type; ``attrs.evolve`` swaps any operation.

    Which function does what is documented where its type is: in ``lightrft.strategy.protocol``.
    """

    name: str
    config: StrategyConfig
    args: object
    world_size: int
    local_rank: int
    device: torch.device

    setup_distributed: protocol.SetupDistributed
    is_rank_0: protocol.IsRank0
    get_rank: protocol.GetRank
    print: protocol.Print
    barrier: protocol.Barrier
    close: protocol.Close

    all_reduce: protocol.AllReduce
    all_gather: protocol.AllGather
    broadcast: protocol.Broadcast

    create_optimizer: protocol.CreateOptimizer
    prepare: protocol.Prepare
    prepare_models_and_optimizers: protocol.PrepareModelsAndOptimizers
    backward: protocol.Backward
    optimizer_step: protocol.OptimizerStep
    get_grad_norm: protocol.GetGradNorm
    unwrap_model: protocol.UnwrapModel
    init_model_context: protocol.InitModelContext
    setup_dataloader: protocol.SetupDataloader
    moving_average: protocol.MovingAverage

    save_ckpt: protocol.SaveCkpt
    load_ckpt: protocol.LoadCkpt
    save_model: protocol.SaveModel
    load_model: protocol.LoadModel

    maybe_offload_optimizer: protocol.MaybeOffloadOptimizer
    maybe_load_optimizer: protocol.MaybeLoadOptimizer
    offload_model: protocol.OffloadModel
    reload_model: protocol.ReloadModel
    report_memory: protocol.ReportMemory

    setup_inference_engine: protocol.SetupInferenceEngine
    update_engine_weights: protocol.UpdateEngineWeights
    maybe_sleep_inference_engine: protocol.MaybeSleepInferenceEngine
    wakeup_inference_engine: protocol.WakeupInferenceEngine
    engine_generate_local: protocol.EngineGenerateLocal
    gather_and_generate: protocol.GatherAndGenerate

    @property
    def seed(self) -> int:
        """``config.seed``."""
        return self.config.seed

    @property
    def max_norm(self) -> float:
        """``config.max_norm``: 0 means no clipping."""
        return self.config.max_norm

    @property
    def micro_train_batch_size(self) -> int:
        """Samples in one ``backward`` of one rank."""
        return self.config.micro_train_batch_size

    @property
    def train_batch_size(self) -> int:
        """Samples in one update, over all ranks."""
        return self.config.train_batch_size

    @property
    def accumulated_gradient(self) -> int:
        """Micro-batches of one rank in one update."""
        return accumulated_gradient(self.config, self.world_size)


def compose(strategy: StrategyRecord, *wrappers: Callable[[StrategyRecord], StrategyRecord]) -> StrategyRecord:
    """``strategy`` inside ``wrappers``, the first one innermost."""
    return reduce(lambda inner, wrap: wrap(inner), wrappers, strategy)


__all__ = [
    "Bound",
    "EngineState",
    "Peer",
    "PendingSave",
    "RunState",
    "StrategyRecord",
    "TrainedModel",
    "Window",
    "bind",
    "compose",
    "evolve",
]
