"""What a trainer may call: one callback Protocol per operation, one Protocol per capability, and ``Strategy`` = all of them.

Read it from the bottom: ``Strategy`` is the sum of seven capabilities, each capability lists its operations, and each
operation is a callback Protocol that holds the signature and its meaning, once. A trainer annotates the least that it
needs (``def log_metrics(strategy: Collectives, ...)``). A backend is any object with these attributes: a record of
functions as ours, or an ordinary class with methods.

The numbers in brackets are those of the laws (docs/laws.md). A = accumulated_gradient, the number of micro-batches in
one update: ``train_batch_size / (micro_train_batch_size * world_size)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypedDict, TypeVar, overload

from attrs import frozen
from typing_extensions import Unpack

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.engines.protocol import Completion, Engine
    from lightrft.strategy.config import StrategyConfig

ReduceOp = Literal["mean", "sum", "max", "min"]
"""How values of the ranks become one. Every rank has the same weight; for counts that differ use ``weighted_mean``."""

Reducible: TypeAlias = "Tensor | float | Mapping[str, Reducible]"
"""What collectives accept: tensors, numbers (Python's and numpy's), and mappings of them, nested as you like."""

Gathered: TypeAlias = "list[Tensor] | list[float] | dict[str, Gathered]"

T = TypeVar("T")
V = TypeVar("V")
ModelT = TypeVar("ModelT", bound="Module")
CriticT = TypeVar("CriticT", bound="Module")
OptimizerT = TypeVar("OptimizerT", bound="Optimizer")
ItemT = TypeVar("ItemT", bound="PrepareItem")
Item2T = TypeVar("Item2T", bound="PrepareItem")
Item3T = TypeVar("Item3T", bound="PrepareItem")
Item4T = TypeVar("Item4T", bound="PrepareItem")

PrepareItem: TypeAlias = (
    "Module | tuple[Module, Optimizer] | tuple[Module, Optimizer, LRScheduler] | tuple[Module, None] | None"
)
"""What ``prepare`` takes and gives back: a model, a pair, a triple, or None for a model that this run does not have."""


@frozen
class StepOutcome:
    """What ``optimizer_step`` did.

    ``applied``: parameters changed. ``micro_step``: this was the micro_step-th call of its window, counted from 1.
    ``grad_norm``: global 2-norm of the gradient before clipping, None between updates. ``skipped_nonfinite``: the norm
    was infinite or NaN on some rank, so no rank changed anything (T4).
    """

    applied: bool
    micro_step: int
    grad_norm: float | None
    skipped_nonfinite: bool


@frozen
class MemoryReport:
    """Memory of this rank, in bytes; the device's figures are None on CPU."""

    resident: int
    device_allocated: int | None
    device_peak: int | None


class AdamWOptions(TypedDict, total=False):
    """Keywords of ``create_optimizer``: those of ``torch.optim.AdamW``."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


# ------------------------------------------------------------------------------------------------------------ ranks


class SetupDistributed(Protocol):
    """Joins the other ranks and seeds this one. Called again, it changes nothing (W3)."""

    def __call__(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        """``timeout`` bounds the wait for the other ranks, now and in every later collective."""
        ...


class IsRank0(Protocol):
    """Whether this process is the one that logs and writes."""

    def __call__(self) -> bool: ...


class GetRank(Protocol):
    """This process's rank, 0 to world_size - 1."""

    def __call__(self) -> int: ...


class Print(Protocol):
    """Prints on rank 0 only."""

    def __call__(self, *msg: object) -> None: ...


class Barrier(Protocol):
    """Returns when every rank has called it."""

    def __call__(self) -> None: ...


class Close(Protocol):
    """Leaves no process group, child process, port or temporary file; a second call is harmless (W3)."""

    def __call__(self) -> None: ...


# ------------------------------------------------------------------------------------------------------ collectives


class AllReduce(Protocol):
    """One value out of every rank's, the same on all ranks (G1, G3). The input is never changed.

    Structure, dtype, shape and device are kept. Integers stay exact up to 2**63 under sum, max and min; their mean is
    a float (float64 for tensors), and so is the mean of booleans; their sum is an integer. ``{}`` gives ``{}``.
    Raises ``ValueError`` for an unknown ``op`` and ``TypeError`` for data that cannot be reduced, before anything is sent.
    """

    @overload
    def __call__(self, data: Tensor, op: ReduceOp = "mean") -> Tensor: ...
    @overload
    def __call__(self, data: int, op: Literal["sum", "max", "min"]) -> int: ...
    @overload
    def __call__(self, data: float, op: ReduceOp = "mean") -> float: ...
    @overload
    def __call__(self, data: Mapping[str, Tensor], op: ReduceOp = "mean") -> dict[str, Tensor]: ...
    @overload
    def __call__(self, data: Mapping[str, int], op: Literal["sum", "max", "min"]) -> dict[str, int]: ...
    @overload
    def __call__(self, data: Mapping[str, float], op: ReduceOp = "mean") -> dict[str, float]: ...
    @overload
    def __call__(self, data: Mapping[str, Reducible], op: ReduceOp = "mean") -> dict[str, Reducible]: ...


class AllGather(Protocol):
    """Every rank's value, in rank order (G2): a list with world_size entries, or a dict of such lists for a mapping.

    Shapes may differ between ranks; empty tensors, bool and bfloat16 work. At world size 1 the list holds the data itself.
    """

    @overload
    def __call__(self, data: Tensor) -> list[Tensor]: ...
    @overload
    def __call__(self, data: int) -> list[int]: ...
    @overload
    def __call__(self, data: float) -> list[float]: ...
    @overload
    def __call__(self, data: Mapping[str, Tensor]) -> dict[str, list[Tensor]]: ...
    @overload
    def __call__(self, data: Mapping[str, float]) -> dict[str, list[float]]: ...
    @overload
    def __call__(self, data: Mapping[str, Reducible]) -> dict[str, Gathered]: ...


class Broadcast(Protocol):
    """The value of rank ``src``, on every rank, as a copy. Raises ``ValueError`` when there is no such rank."""

    @overload
    def __call__(self, data: Tensor, src: int = 0) -> Tensor: ...
    @overload
    def __call__(self, data: int, src: int = 0) -> int: ...
    @overload
    def __call__(self, data: float, src: int = 0) -> float: ...
    @overload
    def __call__(self, data: Mapping[str, V], src: int = 0) -> dict[str, V]: ...


# --------------------------------------------------------------------------------------------------------- training


class CreateOptimizer(Protocol):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) over the model's trainable parameters (T9).

    Parameters of fewer than 2 dimensions and biases get no weight decay. Tied parameters are held once, frozen ones
    never. Raises ``ValueError`` when nothing is trainable and ``TypeError`` for an unknown keyword.
    """

    def __call__(self, model: Module, **kwargs: Unpack[AdamWOptions]) -> Optimizer: ...


class Prepare(Protocol):
    """Makes models ready for this backend, in the order and arity in which they came (T11).

    One item gives one item, several give a tuple; ``None`` stays ``None``. A pair ``(model, optimizer)`` or a triple
    with a scheduler is trained; a model alone that is in eval mode gets no gradients. Make the optimizer on the plain
    model first: that order of calls serves every backend.
    """

    @overload
    def __call__(self, item: ItemT, /, *, is_rlhf: bool = False) -> ItemT: ...
    @overload
    def __call__(self, item: ItemT, item2: Item2T, /, *, is_rlhf: bool = False) -> tuple[ItemT, Item2T]: ...
    @overload
    def __call__(
        self, item: ItemT, item2: Item2T, item3: Item3T, /, *, is_rlhf: bool = False
    ) -> tuple[ItemT, Item2T, Item3T]: ...
    @overload
    def __call__(
        self, item: ItemT, item2: Item2T, item3: Item3T, item4: Item4T, /, *, is_rlhf: bool = False
    ) -> tuple[ItemT, Item2T, Item3T, Item4T]: ...
    @overload
    def __call__(
        self, *models_or_model_optim_pairs: PrepareItem, is_rlhf: bool = False
    ) -> PrepareItem | tuple[PrepareItem, ...]: ...


class PrepareModelsAndOptimizers(Protocol):
    """All models of an RLHF run at once: trained ones as (model, optimizer, scheduler), the others frozen.

    The learning rates, betas and weight decay are the configuration's (``actor_learning_rate``, ``critic_learning_rate``,
    ``adam_betas``, ``l2``); the schedule is a cosine with warm-up (``lr_warmup_ratio``) down to a tenth of the rate over
    ``max_steps`` updates.
    """

    @overload
    def __call__(
        self,
        actor: ModelT,
        critic: None,
        reward_models: Sequence[Module] | Module | None,
        initial_model: Module | None,
        args: object,
        max_steps: int,
    ) -> tuple[
        tuple[ModelT, Optimizer, LRScheduler],
        tuple[None, None, None],
        Sequence[Module] | Module | None,
        Module | None,
    ]: ...
    @overload
    def __call__(
        self,
        actor: ModelT,
        critic: CriticT,
        reward_models: Sequence[Module] | Module | None,
        initial_model: Module | None,
        args: object,
        max_steps: int,
    ) -> tuple[
        tuple[ModelT, Optimizer, LRScheduler],
        tuple[CriticT, Optimizer, LRScheduler],
        Sequence[Module] | Module | None,
        Module | None,
    ]: ...


class Backward(Protocol):
    """Adds one micro-batch to the gradient of the window (T1): one call per micro-batch.

    ``loss`` is the mean over the micro-batch, a scalar; the caller never divides, and its value is left alone. After A
    calls on every rank the gradient is that of the mean loss over the whole batch. ``optimizer.zero_grad()`` between
    updates begins the window anew. Raises ``ValueError`` for a loss that is no scalar or needs no gradient.
    """

    def __call__(self, loss: Tensor, model: Module, optimizer: Optimizer, **kwargs: object) -> None: ...


class OptimizerStep(Protocol):
    """Counts a micro-batch and, on every A-th call of this optimizer, clips, updates and advances the scheduler (T2-T5).

    ``flush=True`` ends a window that was cut short: the update is the mean over the micro-batches that it has (T7).
    ``name`` labels log lines only.
    """

    def __call__(
        self,
        optimizer: Optimizer,
        model: Module,
        scheduler: LRScheduler | None = None,
        name: str = "model",
        *,
        flush: bool = False,
        **kwargs: object,
    ) -> StepOutcome: ...


class GetGradNorm(Protocol):
    """Global 2-norm of the model's gradients now, or, when they were just used up, of the last update before clipping."""

    def __call__(self, model: Module) -> float: ...


class UnwrapModel(Protocol):
    """The user's module, out of engines, compiled modules and actor wrappers (T12)."""

    def __call__(self, model: Module) -> Module: ...


class InitModelContext(Protocol):
    """The context in which models are made: equal parameters on all ranks for equal seeds (W4)."""

    def __call__(self, meta_init: bool = False) -> AbstractContextManager[None]: ...


Dataset: TypeAlias = "Sequence[T] | torch.utils.data.Dataset[T]"


class SetupDataloader(Protocol):
    """Batches of a dataset or a replay buffer, each sample once per epoch, whatever the number of ranks.

    ``consumed_samples`` (over all ranks) are skipped at the start: the way to resume in mid-epoch.
    """

    def __call__(
        self,
        replay_buffer: Dataset[T],
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[T]], object] | None = None,
        drop_last: bool = True,
        sampler: Iterable[int] | None = None,
        consumed_samples: int = 0,
    ) -> torch.utils.data.DataLoader[T]: ...


class MovingAverage(Protocol):
    """``ema = beta * ema + (1 - beta) * parameter``, in place, once per applied update (T12).

    May be called after every micro-batch: between updates it does nothing. A model that no ``optimizer_step`` of this
    strategy has trained is averaged on each call.
    """

    def __call__(self, model: Module, model_ema: Module, beta: float = 0.992) -> None: ...


# ------------------------------------------------------------------------------------------------------ checkpoints


class SaveCkpt(Protocol):
    """Saves the whole state of training under ``save_dir/tag``, atomically, then rotates (K1, K4, K5).

    ``optimizer`` and ``scheduler`` default to those that the model was prepared or last stepped with. ``tag`` defaults
    to ``step<updates>``. At most ``max_num`` checkpoints are kept (<= 0: all) and at most ``max_mem`` GB (10**9 bytes).
    ``client_state`` may hold ints, floats, strings, lists, dicts and tensors; anything else is a ``TypeError`` now.
    """

    def __call__(
        self,
        model: Module,
        save_dir: str | Path,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: int = 1000,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None: ...


class LoadCkpt(Protocol):
    """Restores what ``save_ckpt`` wrote; returns ``(path, client_state)`` (K1, K6, K7).

    Without ``tag``: ``latest``, or the newest whole one. Raises ``CheckpointError`` naming path and reason, and then the
    model is untouched.
    """

    def __call__(
        self,
        model: Module,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> tuple[str, dict[str, object]]: ...


class PretrainedTokenizer(Protocol):
    """The one thing that ``save_model`` asks of a tokenizer."""

    def save_pretrained(self, save_directory: str, /) -> object: ...


class SaveModel(Protocol):
    """Writes a Hugging Face directory (K10); ``tokenizer`` may be None."""

    def __call__(
        self, model: Module, tokenizer: PretrainedTokenizer | None, output_dir: str | Path, **kwargs: object
    ) -> None: ...


class LoadModel(Protocol):
    """Loads weights from a Hugging Face directory or a safetensors file into ``model``, in place."""

    def __call__(
        self,
        model: Module,
        path: str | Path,
        map_location: str = "cpu",
        strict: bool = False,
        key_replace_fn: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
    ) -> None: ...


# ----------------------------------------------------------------------------------------------------------- memory


class MaybeOffloadOptimizer(Protocol):
    """Moves the optimizer's state to the CPU, where that frees anything; returns the same optimizer."""

    def __call__(self, optimizer: OptimizerT) -> OptimizerT: ...


class MaybeLoadOptimizer(Protocol):
    """Undoes ``maybe_offload_optimizer``; ``device`` defaults to the strategy's."""

    def __call__(self, optimizer: OptimizerT, device: torch.device | str | None = None) -> OptimizerT: ...


class OffloadModel(Protocol):
    """Moves the model to the CPU; ``backward`` on it is an error until ``reload_model``."""

    def __call__(self, model: ModelT) -> ModelT: ...


class ReloadModel(Protocol):
    """Brings an offloaded model back to the strategy's device."""

    def __call__(self, model: ModelT) -> ModelT: ...


class ReportMemory(Protocol):
    """Logs this rank's memory on rank 0 and returns it."""

    def __call__(self, prefix: str = "") -> MemoryReport: ...


# ---------------------------------------------------------------------------------------------------------- rollout


class SetupInferenceEngine(Protocol):
    """Starts the engine that generates; returns it, or None where a backend has none (the fake).

    ``engine_type`` is a name or an engine that you made. ``args`` may carry ``tokenizer`` and ``max_model_len``.
    """

    def __call__(
        self, args: object, engine_type: str | Engine = "vllm", actor: Module | None = None
    ) -> Engine | None: ...


class UpdateEngineWeights(Protocol):
    """From here on the engine generates with the actor's weights as they are now (R2)."""

    def __call__(self, actor: Module) -> None: ...


class MaybeSleepInferenceEngine(Protocol):
    """Lets the engine free memory until it is needed again, if it can (R4)."""

    def __call__(self) -> None: ...


class WakeupInferenceEngine(Protocol):
    """Undoes ``maybe_sleep_inference_engine``; harmless when awake."""

    def __call__(self) -> None: ...


class EngineGenerateLocal(Protocol):
    """Completions of this rank's prompts. Exactly one of the two kinds of input, else ``ValueError`` (R5)."""

    def __call__(
        self,
        sampling_params: object,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        multi_modal_inputs: Sequence[Mapping[str, object]] | None = None,
    ) -> list[Completion]: ...


class GatherAndGenerate(Protocol):
    """Completions of this rank's own prompts in their own order, ``n`` of one prompt adjacent (R1).

    ``sampling_params`` is a ``Sampling``, a mapping or an engine's own object. The engine sleeps afterwards where the
    configuration enables it and ``sleep_engine`` is true.
    """

    def __call__(
        self,
        sampling_params: object,
        all_prompt_token_ids: Sequence[Sequence[int]] | None = None,
        all_prompts: Sequence[str] | None = None,
        all_images: Sequence[object] | None = None,
        sleep_engine: bool = True,
        images_num: Sequence[int] | None = None,
        all_videos: Sequence[object] | None = None,
        videos_num: Sequence[int] | None = None,
    ) -> list[Completion]: ...


# ----------------------------------------------------------------------------------------------------- capabilities


class Facts(Protocol):
    """What does not change while a strategy lives."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> StrategyConfig: ...
    @property
    def args(self) -> object: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_norm(self) -> float: ...
    @property
    def micro_train_batch_size(self) -> int: ...
    @property
    def train_batch_size(self) -> int: ...
    @property
    def accumulated_gradient(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class Ranks(Protocol):
    """Who this process is among the others."""

    @property
    def setup_distributed(self) -> SetupDistributed: ...
    @property
    def is_rank_0(self) -> IsRank0: ...
    @property
    def get_rank(self) -> GetRank: ...
    @property
    def print(self) -> Print: ...
    @property
    def barrier(self) -> Barrier: ...
    @property
    def close(self) -> Close: ...


class Collectives(Protocol):
    """Values across ranks."""

    @property
    def all_reduce(self) -> AllReduce: ...
    @property
    def all_gather(self) -> AllGather: ...
    @property
    def broadcast(self) -> Broadcast: ...


class Training(Protocol):
    """From a loss to an update."""

    @property
    def create_optimizer(self) -> CreateOptimizer: ...
    @property
    def prepare(self) -> Prepare: ...
    @property
    def prepare_models_and_optimizers(self) -> PrepareModelsAndOptimizers: ...
    @property
    def backward(self) -> Backward: ...
    @property
    def optimizer_step(self) -> OptimizerStep: ...
    @property
    def get_grad_norm(self) -> GetGradNorm: ...
    @property
    def unwrap_model(self) -> UnwrapModel: ...
    @property
    def init_model_context(self) -> InitModelContext: ...
    @property
    def setup_dataloader(self) -> SetupDataloader: ...
    @property
    def moving_average(self) -> MovingAverage: ...


class Checkpoints(Protocol):
    """State on disk."""

    @property
    def save_ckpt(self) -> SaveCkpt: ...
    @property
    def load_ckpt(self) -> LoadCkpt: ...
    @property
    def save_model(self) -> SaveModel: ...
    @property
    def load_model(self) -> LoadModel: ...


class Memory(Protocol):
    """What lies on the device."""

    @property
    def maybe_offload_optimizer(self) -> MaybeOffloadOptimizer: ...
    @property
    def maybe_load_optimizer(self) -> MaybeLoadOptimizer: ...
    @property
    def offload_model(self) -> OffloadModel: ...
    @property
    def reload_model(self) -> ReloadModel: ...
    @property
    def report_memory(self) -> ReportMemory: ...


class Rollout(Protocol):
    """From prompts to completions."""

    @property
    def setup_inference_engine(self) -> SetupInferenceEngine: ...
    @property
    def update_engine_weights(self) -> UpdateEngineWeights: ...
    @property
    def maybe_sleep_inference_engine(self) -> MaybeSleepInferenceEngine: ...
    @property
    def wakeup_inference_engine(self) -> WakeupInferenceEngine: ...
    @property
    def engine_generate_local(self) -> EngineGenerateLocal: ...
    @property
    def gather_and_generate(self) -> GatherAndGenerate: ...


class Strategy(Facts, Ranks, Collectives, Training, Checkpoints, Memory, Rollout, Protocol):
    """Everything between a trainer and what runs it."""


class BuildStrategy(Protocol):
    """How a backend is made: what an entry point of the group ``lightrft.backends`` names."""

    def __call__(self, config: StrategyConfig, args: object = None) -> Strategy: ...
