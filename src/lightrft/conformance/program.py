"""Programs: what a trainer does to a strategy, as data, and what can be seen of it after each operation.

A program means the same on any number of ranks that divides its lanes. A lane is one micro-batch, one number or one list
of prompts; each rank takes as many lanes as the others, consecutive ones, and trains on them one after another.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

from lightrft.strategy.protocol import ReduceOp

Name = Literal["actor", "critic"]
NAMES: tuple[Name, ...] = ("actor", "critic")
Shape = Literal["line", "mlp", "tied", "frozen"]
Prompts = tuple[tuple[int, ...], ...]


@frozen
class Train:
    """One micro-batch for each lane: ``backward`` and ``optimizer_step``; the last one with ``flush``.

    ``poisoned``: the loss of the last lane is NaN.
    """

    model: Name
    seed: int
    poisoned: bool = False
    flush: bool = False


@frozen
class Flush:
    """``optimizer_step(flush=True)`` without a micro-batch."""

    model: Name


@frozen
class ZeroGrad:
    """``optimizer.zero_grad()``."""

    model: Name


@frozen
class GradNorm:
    """``get_grad_norm``."""

    model: Name


@frozen
class MovingAverage:
    """Of the actor."""

    beta: float


@frozen
class Offload:
    """A model and the state of its optimizer: away and back."""

    model: Name


@frozen
class Reduce:
    """``all_reduce`` of one value for each lane, as a number and as a tensor."""

    values: tuple[int, ...] | tuple[float, ...]
    op: ReduceOp


@frozen
class Gather:
    """``all_gather`` of one value for each lane."""

    values: tuple[int, ...]


@frozen
class Broadcast:
    """``broadcast`` from the rank of a lane."""

    values: tuple[int, ...]
    lane: int


@frozen
class Barrier:
    """Every rank waits."""


@frozen
class Save:
    """``save_ckpt``, with ``note`` in the client state."""

    model: Name
    tag: str
    note: int = 0
    latest: bool = True


@frozen
class Load:
    """``load_ckpt``."""

    model: Name
    tag: str | None = None
    module_only: bool = False


@frozen
class SaveModel:
    """``save_model``."""

    model: Name


@frozen
class LoadModel:
    """``load_model``."""

    model: Name


@frozen
class Restart:
    """Closes the strategy and begins anew: what was not saved is lost."""


@frozen
class Sleep:
    """``maybe_sleep_inference_engine``."""


@frozen
class Wake:
    """``wakeup_inference_engine``."""


@frozen
class UpdateWeights:
    """``update_engine_weights(actor)``."""


@frozen
class Generate:
    """``gather_and_generate`` of some prompts for each lane."""

    prompts: tuple[Prompts, ...]
    n: int = 1
    seed: int = 0
    sleep: bool = True


Operation: TypeAlias = (
    Train
    | Flush
    | ZeroGrad
    | GradNorm
    | MovingAverage
    | Offload
    | Reduce
    | Gather
    | Broadcast
    | Barrier
    | Save
    | Load
    | SaveModel
    | LoadModel
    | Restart
    | Sleep
    | Wake
    | UpdateWeights
    | Generate
)


@frozen(kw_only=True)
class Setup:
    """What a program begins with. Actor and critic are of one shape and differ in their values."""

    shape: Shape = "line"
    width: int = 4
    accumulation: int = 1
    """Trains in one window."""
    micro: int = 1
    """Samples of a lane."""
    lanes: int = 2
    max_norm: float = 0.0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    weight_decay: float = 0.0
    eps: float = 1e-2
    """Of AdamW. Large, so that the scale of a gradient shows in the update."""
    decay: float = 1.0
    """The rate is multiplied by it after each update."""
    keep: int = 2
    """Checkpoints, at most."""
    sleeps: bool = False
    """Engines sleep after generating."""


@frozen
class Program:
    """Operations, in their order. Its repr is an expression that gives it back, with this module's names at hand."""

    setup: Setup
    operations: tuple[Operation, ...]
