"""What a checkpoint of one process holds, and how it gets back into a model, an optimizer and the random generators.

==================================  ==================================================================================
``model.safetensors``               parameters and persistent buffers by name; tied ones once, the others as aliases
``optimizer.json, .safetensors``    class, param_groups with parameter *names*, state as ``<parameter>/<state key>``
``scheduler.json``                  class and ``state_dict()``
``rng_rank<r>.json, .safetensors``  random states: torch (CPU, CUDA where it is in use), numpy, Python
``client_state.json, .safetensors`` what the caller wants back
``counters.json``                   step counters
==================================  ==================================================================================

Loading first reads and checks everything, then changes something: an error leaves all objects as they were (law K6).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightrft.checkpoints.checksums import FileEntry
from lightrft.checkpoints.client_state import Json, encode, read_mapping, write_value
from lightrft.checkpoints.deepspeed_native import find_native, fp32_weights, optimizer_moments, updates
from lightrft.checkpoints.optimizer_state import (
    apply_optimizer,
    checked_moments,
    checked_optimizer,
    encoded_optimizer,
)
from lightrft.checkpoints.reading import Read, as_it_is
from lightrft.checkpoints.tensors import (
    TensorFile,
    read_tensors,
    storage_key,
    unstorable,
    write_tensors,
)
from lightrft.errors import CheckpointError, listed

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger(__name__)

MODEL = "model.safetensors"
OPTIMIZER, SCHEDULER, CLIENT_STATE, COUNTERS = "optimizer", "scheduler", "client_state", "counters"


@frozen
class LoadedState:
    """What a checkpoint holds for the caller."""

    client_state: dict[str, object]
    counters: dict[str, int]


@frozen(eq=False)
class EncodedState:
    """All that a checkpoint will hold, known to be storable: JSON, and the tensors of model and optimizer, not yet read."""

    weights: dict[str, Tensor]
    optimizer: tuple[Json, dict[str, Tensor]] | None
    values: dict[str, tuple[Json, dict[str, Tensor]]]
    """The rest, by the stem of its file; its tensors are small and on the CPU."""


def encoded_state(
    *,
    model: Module,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    counters: Mapping[str, int] | None = None,
    client_state: Mapping[str, object] | None = None,
    random_states: Sequence[Mapping[str, object]] | None = None,
    placeholders: bool = False,
) -> EncodedState:
    """What :func:`write_state` writes. Only tensors may change afterwards.

    ``random_states``: every rank's :func:`random_state`, in rank order; by default that of this process, as rank 0's.
    ``placeholders``: tensors of model and optimizer may be on the meta device. ``TypeError`` names the place in
    ``client_state`` that cannot be stored, ``CheckpointError`` the parameter.
    """
    values: dict[str, tuple[Json, dict[str, Tensor]]] = {}
    values[CLIENT_STATE] = _encoded(dict(client_state or {}), CLIENT_STATE)
    values[COUNTERS] = _encoded({name: index(value) for name, value in (counters or {}).items()}, COUNTERS)
    for rank, state in enumerate([random_state()] if random_states is None else random_states):
        values[f"rng_rank{rank}"] = _encoded(dict(state), "random state")
    if scheduler is not None:
        values[SCHEDULER] = _encoded(_scheduler_state(scheduler), SCHEDULER)
    weights = _weights(model)
    for name, tensor in weights.items():
        if (problem := unstorable(tensor)) and not (placeholders and tensor.is_meta):
            raise CheckpointError(f"cannot save {name!r} of the model: {problem}")
    return EncodedState(weights, None if optimizer is None else encoded_optimizer(model, optimizer), values)


def write_state(directory: Path | None, state: EncodedState, read: Read = as_it_is) -> dict[str, FileEntry]:
    """Writes the files of a checkpoint into ``directory``, which exists. Returns the entries of the large ones, by name.

    ``read`` gives the values of a tensor of the model or the optimizer when its turn has come. Without a directory
    nothing is written, and all is read in the same order: what the ranks do that do not write, where reading takes all
    of them.
    """

    def file(name: str) -> Path | None:
        return None if directory is None else directory / name

    entries = {MODEL: write_tensors(file(MODEL), state.weights, read)}
    if state.optimizer is not None:
        entries[f"{OPTIMIZER}.safetensors"] = write_value(file(f"{OPTIMIZER}.json"), *state.optimizer, read)
    if directory is not None:
        for stem, (tree, tensors) in state.values.items():
            write_value(directory / f"{stem}.json", tree, tensors)
    return {name: entry for name, entry in entries.items() if entry is not None}


def _encoded(value: object, name: str) -> tuple[Json, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    return encode(value, name, tensors), tensors


def load_state(
    directory: Path,
    *,
    model: Module,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    strict: bool = True,
    load_optimizer: bool = True,
    load_scheduler: bool = True,
    module_only: bool = False,
    rank: int = 0,
    outline: bool = False,
) -> LoadedState:
    """Brings back what :func:`write_state` wrote: bitwise where dtypes are the same, in place, so that parameters keep
    their identity. Of a directory that DeepSpeed itself wrote: weights, and the optimizer's moments.

    ``outline``: the model's tensors hold no values. They are replaced by what the file has, in the file's memory; those
    that it lacks stay as they are.

    ``strict``: missing and unexpected keys of the model are errors, otherwise a warning; a wrong shape is an error.
    ``module_only`` changes the model alone: not the optimizer, the scheduler or the random generators.

    Raises ``CheckpointError`` before anything is changed.
    """
    if find_native(directory) is not None:
        moved = optimizer if load_optimizer and not module_only else None
        return _load_native(directory, model, moved, strict=strict, outline=outline)
    weights = read_tensors(directory / MODEL)
    _check_weights(model, weights, directory / MODEL, strict, outline)
    loaded = LoadedState(read_mapping(directory / f"{CLIENT_STATE}.json"), _counters(directory / f"{COUNTERS}.json"))
    rng, restored, schedule = None, None, None
    if not module_only:
        rng = _rng_of(directory, rank)
        if optimizer is not None and load_optimizer:
            restored = checked_optimizer(model, optimizer, directory / f"{OPTIMIZER}.json")
        if scheduler is not None and load_scheduler:
            schedule = _checked_scheduler(scheduler, directory / f"{SCHEDULER}.json")
    orphans = _orphans(model, weights, optimizer)

    # From here on things change. The scheduler is first: what it accepts, only its own code knows.
    if scheduler is not None and schedule is not None:
        try:
            scheduler.load_state_dict(schedule)
        except Exception as error:
            raise CheckpointError(f"{directory / SCHEDULER}.json does not fit the scheduler: {error!r}") from error
    model.load_state_dict(weights.named(), strict=False, assign=outline)
    _tie(model, orphans)
    if optimizer is not None and restored is not None:
        apply_optimizer(optimizer, restored)
    if rng is not None:
        _apply_rng(rng)
    return loaded


def _load_native(
    directory: Path, model: Module, optimizer: Optimizer | None, *, strict: bool, outline: bool
) -> LoadedState:
    """Weights, and with an ``optimizer`` its moments where they are kept. All else goes on as it is: the log says so.

    For a while the whole is in the memory of this process.
    """
    weights, moments = TensorFile(fp32_weights(directory)), None
    _check_weights(model, weights, directory, strict, outline)
    if optimizer is not None:
        moments = checked_moments(model, optimizer, directory, optimizer_moments(directory))
    counters = {"updates": updates(directory)}

    model.load_state_dict(weights.named(), strict=False, assign=outline)
    if optimizer is not None and moments is not None:
        apply_optimizer(optimizer, moments)
    restored = ["the weights"]
    if moments is not None and moments.state:
        restored.append(f"the optimizer's state of {len(moments.state)} parameters")
    logger.info(
        "%s was written by DeepSpeed itself: restored %s; not restored: %soptimizer settings, scheduler, random states, "
        "client_state",
        directory,
        " and ".join(restored),
        "" if len(restored) > 1 else "optimizer state, ",
    )
    return LoadedState({}, counters)


# --- model


def _weights(model: Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, as they are in the model, tied ones under each of their names."""
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the model keeps {name!r}, a {type(value).__name__}, in its state_dict. Only tensors can be saved: "
                "make it a buffer, or put it into client_state."
            )
        weights[name] = value
    return weights


def _check_weights(model: Module, weights: TensorFile, file: Path, strict: bool, outline: bool) -> None:
    """``CheckpointError`` if the weights in ``file`` do not fit ``model`` (law K7)."""
    targets, named = _weights(model), weights.named()
    # A name whose memory another name fills is not missing.
    filled = {storage_key(targets[name]) for name in named.keys() & targets.keys()}
    missing = [name for name in targets if name not in named and storage_key(targets[name]) not in filled]
    unexpected = [name for name in named if name not in targets]
    mismatched = [
        f"{name}: shape {tuple(named[name].shape)} in the checkpoint, {tuple(target.shape)} in the model"
        for name, target in targets.items()
        if name in named and named[name].shape != target.shape
    ]
    meta = [name for name in targets if targets[name].is_meta and not outline]
    lost = [f"{name}: on the meta device, it cannot hold values" for name in meta]
    absent = [f"missing in the checkpoint: {name}" for name in missing]
    absent += [f"unexpected, not in the model: {name}" for name in unexpected]
    problems = mismatched + lost + (absent if strict else [])
    if problems:
        hint = "\nPass load_module_strict=False to load what fits by name." if strict and absent else ""
        raise CheckpointError(f"{file} does not fit the model:{listed(problems)}{hint}")
    if absent:
        logger.warning("%s does not fit the model in every name:%s", file, listed(absent))
    cast = [name for name, target in targets.items() if name in named and named[name].dtype != target.dtype]
    if cast:
        logger.warning(
            "%s: %d tensors change their dtype as they are loaded, the first is %s", file, len(cast), cast[0]
        )


def _orphans(model: Module, weights: TensorFile, optimizer: Optimizer | None) -> dict[str, str]:
    """The names that were tied when the checkpoint was saved and are not in ``model``."""
    targets = _weights(model)
    groups = optimizer.param_groups if optimizer is not None else []
    held = {id(parameter) for group in groups for parameter in group["params"]}
    orphans = {}
    for alias, name in weights.aliases.items():
        if alias in targets and name in targets and storage_key(targets[alias]) != storage_key(targets[name]):
            if id(targets[alias]) in held:
                raise CheckpointError(
                    f"{alias!r} is tied to {name!r} in the checkpoint, but has its own entry in the optimizer. "
                    "Tie the weights of the model before the optimizer is made."
                )
            orphans[alias] = name
    return orphans


def _tie(model: Module, orphans: Mapping[str, str]) -> None:
    targets = _weights(model)
    for alias, name in orphans.items():
        owner, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(owner), leaf, targets[name])
        logger.info("tied %s to %s, as in the checkpoint", alias, name)


# --- scheduler and counters


def _scheduler_state(scheduler: LRScheduler) -> dict[str, object]:
    try:
        return {"class": type(scheduler).__name__, "state": scheduler.state_dict()}
    except AttributeError as error:
        raise CheckpointError(
            f"the state of the {type(scheduler).__name__} cannot be read: {error}. "
            "A callable that it uses must be a function, or have a __dict__."
        ) from error


def _checked_scheduler(scheduler: LRScheduler, file: Path) -> dict[str, object]:
    saved = read_mapping(file, "pass load_lr_scheduler_states=False")
    name, state = saved.get("class"), saved.get("state")
    if name != type(scheduler).__name__ or not isinstance(state, dict):
        raise CheckpointError(
            f"{file} was written by {name}, the scheduler is {type(scheduler).__name__}. "
            "Make the same scheduler, or pass load_lr_scheduler_states=False."
        )
    rates, groups = state.get("base_lrs"), scheduler.optimizer.param_groups
    if isinstance(rates, list) and len(rates) != len(groups):
        raise CheckpointError(f"{file} has {len(rates)} base learning rates for {len(groups)} parameter groups")
    return state


def _counters(file: Path) -> dict[str, int]:
    counters = read_mapping(file)
    return {name: value for name, value in counters.items() if isinstance(value, int)}


# --- random generators


def random_state() -> dict[str, object]:
    """The states of this process's generators."""
    # Asking for the state would start CUDA, which costs a process that does not use it hundreds of megabytes.
    cuda = torch.cuda.get_rng_state_all() if _cuda_in_use() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "python": random.getstate()}


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's


@frozen
class _RandomStates:
    """States that their generators have accepted."""

    torch: Tensor
    cuda: list[Tensor]
    numpy: tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.uint32]], int, int, float]
    python: tuple[object, ...]


def _rng_of(directory: Path, rank: int) -> _RandomStates | None:
    """The states of a rank; None, with a warning, for a rank that was not there when it was saved."""
    file = directory / f"rng_rank{rank}.json"
    if rank > 0 and not file.exists():
        logger.warning("%s holds no random state of rank %d, which goes on with its own", directory, rank)
        return None
    return _checked_rng(file)


def _checked_rng(file: Path) -> _RandomStates:
    """The states in ``file``, tried on generators that nobody uses."""
    saved = read_mapping(file)
    try:
        states = _RandomStates(**saved)  # type: ignore[arg-type]  # checked by the generators below
        torch.Generator().set_state(states.torch)
        np.random.RandomState().set_state(states.numpy)
        random.Random().setstate(states.python)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{file} holds no random states that can be restored: {error}") from error
    return states


def _apply_rng(states: _RandomStates) -> None:
    torch.set_rng_state(states.torch)
    np.random.set_state(states.numpy)
    random.setstate(states.python)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, cuda in enumerate(states.cuda[:devices]):
        torch.cuda.set_rng_state(cuda, device)
    if len(states.cuda) > devices:
        logger.warning("random states of %d CUDA devices were saved, there are %d", len(states.cuda), devices)
