"""The checkpoint operations of a strategy, on top of ``lightrft.checkpoints``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save_model as save_safetensors
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.checkpoints.layout import find_checkpoint, write_checkpoint
from lightrft.checkpoints.state import load_state, random_state, save_state
from lightrft.errors import CheckpointError, listed
from lightrft.ops.accumulation import refuse_unknown, trained_model, window_of
from lightrft.ops.models import unwrap_model
from lightrft.ops.whole_state import WholeState
from lightrft.strategy.protocol import PretrainedTokenizer
from lightrft.strategy.record import RunState

T = TypeVar("T")

logger = logging.getLogger(__name__)


@frozen(eq=False)
class Saving:
    """What checkpoints are made with: the run, the backend's name for the manifest, and how it holds state."""

    run: RunState
    backend: str
    whole_state: WholeState


def save_ckpt(
    saving: Saving,
    model: Module,
    save_dir: str | Path,
    tag: str | None = None,
    max_num: int = 3,
    max_mem: int = 1000,
    client_state: Mapping[str, object] | None = None,
    save_latest: bool = True,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
) -> None:
    """Rank 0 writes the state, commits it and rotates; every rank's random state is in it."""
    run, known = saving.run, trained_model(saving.run, model)
    optimizer = known.optimizer if optimizer is None else optimizer
    scheduler = known.scheduler if scheduler is None else scheduler
    updates = 0
    if optimizer is not None:
        window = window_of(run, optimizer)
        updates = window.updates
        if window.micro_batches:
            logger.warning(
                "save_ckpt in the middle of a window: the gradients of %d micro-batches are not saved. "
                "Save after an applied update.",
                window.micro_batches,
            )
    writes = run.world.rank == 0
    whole_model, whole_optimizer = saving.whole_state.take(run, model, optimizer, writes)
    random_states = gathered(run, random_state())

    def write(directory: Path) -> None:
        save_state(
            directory,
            model=whole_model,
            optimizer=whole_optimizer,
            scheduler=scheduler,
            counters={"updates": updates, "models_initialised": run.models_initialised},
            client_state=client_state,
            random_states=random_states,
        )

    with together(run, f"save_ckpt to {save_dir}"):
        if writes:
            write_checkpoint(
                save_dir,
                f"step{updates}" if tag is None else tag,
                write,
                backend=saving.backend,
                world_size=run.world.world_size,
                step=updates,
                max_num=max_num,
                max_mem=max_mem,
                save_latest=save_latest,
            )


def load_ckpt(
    saving: Saving,
    model: Module,
    load_dir: str | Path,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
) -> tuple[str, dict[str, object]]:
    """Finds a whole checkpoint and restores it, on all ranks or on none."""
    run, known = saving.run, trained_model(saving.run, model)
    optimizer = known.optimizer if optimizer is None else optimizer
    scheduler = known.scheduler if scheduler is None else scheduler
    whole_model, whole_optimizer = saving.whole_state.take(run, model, optimizer)
    with together(run, f"load_ckpt from {load_dir}"):
        path = find_checkpoint(load_dir, tag)
        loaded = load_state(
            path,
            model=whole_model,
            optimizer=whole_optimizer,
            scheduler=scheduler,
            strict=load_module_strict,
            load_optimizer=load_optimizer_states,
            load_scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            rank=run.world.rank,
        )
    saving.whole_state.put(run, model, optimizer, whole_model, None if load_module_only else whole_optimizer)
    if not load_module_only:
        run.models_initialised = loaded.counters.get("models_initialised", run.models_initialised)
        if optimizer is not None and load_optimizer_states:
            window = window_of(run, optimizer)
            window.restart()
            window.updates = loaded.counters.get("updates", 0)
            optimizer.zero_grad(set_to_none=True)
    return str(path), loaded.client_state


def gathered(run: RunState, value: T) -> list[T]:
    """Every rank's, in rank order."""
    if run.world.world_size == 1:
        return [value]
    values = [value] * run.world.world_size
    dist.all_gather_object(values, value)
    return values


@contextmanager
def together(run: RunState, operation: str) -> Iterator[None]:
    """What fails on one rank inside is an error on all of them."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    told = gathered(run, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed:
        raise CheckpointError(f"{operation} failed elsewhere:{listed(failed)}")


def save_model(
    saving: Saving, /, model: Module, tokenizer: PretrainedTokenizer | None, output_dir: str | Path, **kwargs: object
) -> None:
    """``save_pretrained`` where the model has it, else one safetensors file with tied weights stored once."""
    refuse_unknown("save_model", kwargs)
    run, directory, plain = saving.run, Path(output_dir), unwrap_model(model)
    writes = run.world.rank == 0
    whole_model, _ = saving.whole_state.take(run, model, None, writes)
    with together(run, f"save_model to {output_dir}"):
        if writes:
            write_model(plain, whole_model, directory)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(directory))


def write_model(plain: Module, whole_model: Module, directory: Path) -> None:
    """Files for ``from_pretrained`` where the model has them; the weights are those of ``whole_model``."""
    directory.mkdir(parents=True, exist_ok=True)
    save_pretrained: Callable[..., object] | None = getattr(plain, "save_pretrained", None)
    if save_pretrained is None:
        save_safetensors(whole_model, str(directory / "model.safetensors"))
    elif whole_model is plain:
        save_pretrained(str(directory))
    else:
        save_pretrained(str(directory), state_dict=whole_model.state_dict())


def load_model(
    saving: Saving,
    model: Module,
    path: str | Path,
    map_location: str = "cpu",
    strict: bool = False,
    key_replace_fn: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
) -> None:
    """Reads every ``*.safetensors`` of a directory, or one file, and loads what it holds."""
    source = Path(path)
    plain, _ = saving.whole_state.take(saving.run, model, None)
    with together(saving.run, f"load_model from {path}"):
        read_model(plain, source, map_location, strict, key_replace_fn)
    saving.whole_state.put(saving.run, model, None, plain, None)


def read_model(
    plain: Module,
    source: Path,
    map_location: str,
    strict: bool,
    key_replace_fn: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None,
) -> None:
    """The weights in the files of ``source``, into a whole model."""
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(
            f"{source}: no safetensors file there. Pass a file, or a directory that save_model wrote."
        )
    weights: Mapping[str, Tensor] = {}
    for file in files:
        try:
            weights = {**weights, **load_file(file, device=map_location)}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: not readable as safetensors: {error}.") from error
    if key_replace_fn is not None:
        weights = key_replace_fn(weights)
    own = plain.state_dict(keep_vars=True)
    tied = {name for name, tensor in own.items() if any(tensor is own[other] for other in weights if other in own)}
    lacking, foreign = sorted(own.keys() - weights.keys() - tied), sorted(weights.keys() - own.keys())
    if strict and (lacking or foreign):
        raise CheckpointError(
            f"{source}: the keys do not fit: missing {lacking}, unexpected {foreign}. Use strict=False to load the rest."
        )
    wrong = [
        f"{name}: {tuple(weights[name].shape)} in the file, {tuple(tensor.shape)} in the model"
        for name, tensor in own.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if wrong:
        raise CheckpointError(f"{source}: shapes do not fit: {'; '.join(wrong)}. Load it into the model that it is of.")
    if lacking or foreign:
        logger.warning("%s: missing %s, unexpected %s", source, lacking, foreign)
    with torch.no_grad():
        for name, tensor in own.items():
            if name in weights:
                tensor.copy_(weights[name])
