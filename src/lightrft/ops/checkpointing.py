"""The checkpoint operations of a strategy, on top of ``lightrft.checkpoints``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Thread
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save_model as save_safetensors
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.checkpoints.checksums import FileEntry
from lightrft.checkpoints.deepspeed_native import find_native
from lightrft.checkpoints.layout import checked_tag, find_checkpoint, keep_others_out, let_others_in, write_checkpoint
from lightrft.checkpoints.reading import Read
from lightrft.checkpoints.state import EncodedState, encoded_state, load_state, random_state, write_state
from lightrft.errors import CheckpointError, RankError
from lightrft.ops.accumulation import refuse_unknown, trained_model, window_of
from lightrft.ops.data import restore_sampler_positions, sampler_positions
from lightrft.ops.models import unwrap_model
from lightrft.ops.peers import failing_together
from lightrft.ops.whole_state import Outline, WholeState
from lightrft.strategy.protocol import Close, PretrainedTokenizer
from lightrft.strategy.record import PendingSave, RunState, bind

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
    settle(run)
    with together(run, f"save_ckpt to {save_dir}"):
        tag = checked_tag(f"step{updates}" if tag is None else tag)
        if run.world.rank == 0:
            keep_others_out(save_dir, run.save_dirs)
    outline = saving.whole_state.outline(run, model, optimizer)
    state = encoded_state(
        model=outline.model,
        optimizer=outline.optimizer,
        scheduler=scheduler,
        counters={"updates": updates, "models_initialised": run.models_initialised, **sampler_positions(run)},
        client_state=client_state,
        random_states=gathered(run, random_state()),
        placeholders=not outline.holds_values,
    )

    def commit(write: Callable[[Path], Mapping[str, FileEntry]]) -> None:
        write_checkpoint(
            save_dir,
            tag,
            write,
            backend=saving.backend,
            world_size=run.world.world_size,
            step=updates,
            max_num=max_num,
            max_mem=max_mem,
            save_latest=save_latest,
        )

    if run.config.async_save:
        save_in_background(run, commit, state, outline.read)
    else:
        with together(run, f"save_ckpt to {save_dir}"):
            save_now(run, commit, state, outline.read)


class Commit(Protocol):
    """Commits what ``write`` puts into the directory that it is given; it returns the entries of files that it knows."""

    def __call__(self, write: Callable[[Path], Mapping[str, FileEntry]], /) -> None: ...


def save_now(run: RunState, commit: Commit, state: EncodedState, read: Read) -> None:
    """Rank 0 writes as it reads; the others read with it, since reading may gather."""
    if run.world.rank > 0:
        write_state(None, state, read)
        return
    counted = Counted(read)
    try:
        commit(lambda directory: write_state(directory, state, counted))
    except RankError:
        raise
    except Exception:
        # The others go on reading to the end: what they gather takes this rank too.
        if run.world.world_size > 1:
            write_state(None, state, Rest(read, counted.done))
        raise


@define
class Counted:
    """Counts what was read."""

    read: Read
    done: int = 0

    def __call__(self, tensor: Tensor, /) -> Tensor:
        self.done += 1
        return self.read(tensor)


@define
class Rest:
    """Reads all but the first ``skip``, which were read before."""

    read: Read
    skip: int
    seen: int = 0

    def __call__(self, tensor: Tensor, /) -> Tensor:
        self.seen += 1
        return tensor if self.seen <= self.skip else self.read(tensor)


# --------------------------------------------------------------------------------------------------------- background


@define(eq=False)
class Snapshot:
    """Copies of what was read, by the tensor that they stand for."""

    read: Read
    buffers: list[Tensor] | None
    """Where the copies go: those of the last save, whose pages are there already. None keeps no copies."""
    copies: dict[int, Tensor] = field(factory=dict)
    known: list[Tensor] = field(factory=list)

    def take(self, tensor: Tensor, /) -> Tensor:
        """Reads, and keeps a copy on the CPU."""
        values = self.read(tensor)
        if self.buffers is not None:
            self.copies[id(tensor)] = copied(values.detach(), self.buffers, len(self.known))
            self.known.append(tensor)
        return values

    def taken(self, tensor: Tensor, /) -> Tensor:
        """The copy; what was not read is small, and was not changed."""
        return self.copies.get(id(tensor), tensor)


def copied(values: Tensor, buffers: list[Tensor], place: int) -> Tensor:
    """A copy in the buffer at that place, which is made anew where it does not fit."""
    fits = place < len(buffers) and buffers[place].shape == values.shape and buffers[place].dtype == values.dtype
    if not fits:
        buffers[place:] = [torch.empty_like(values, device="cpu")]
    return buffers[place].copy_(values)


def save_in_background(run: RunState, commit: Commit, state: EncodedState, read: Read) -> None:
    """Copies the state to the CPU, and lets a thread of rank 0 write it. A failure shows at the next save or close."""
    snapshot = Snapshot(read, run.save_buffers if run.world.rank == 0 else None)
    write_state(None, state, snapshot.take)
    if run.world.rank > 0:
        return
    failures: list[Exception] = []

    def write() -> None:
        try:
            commit(lambda directory: write_state(directory, state, snapshot.taken))
        except Exception as error:
            failures.append(error)

    thread = Thread(target=write, name="checkpoint save")  # no daemon: the process ends when it is written
    run.pending_save = PendingSave(thread, failures)
    thread.start()


def settle(run: RunState) -> None:
    """Waits for a save in the background, and raises what went wrong with it, on every rank."""
    if run.config.async_save:
        with together(run, "the save in the background"):
            finish_save(run)


def finish_save(run: RunState) -> None:
    """The same, on this rank alone."""
    pending, run.pending_save = run.pending_save, None
    if pending is not None:
        pending.thread.join()
        for failure in pending.failures:
            raise failure


@frozen(eq=False)
class Closing:
    """What ``close`` does: the run, and how its backend ends it."""

    run: RunState
    end: Close


def close(closing: Closing) -> None:
    """Finishes a save in the background first. What went wrong with it is raised after all is closed."""
    try:
        finish_save(closing.run)
    finally:
        let_others_in(closing.run.save_dirs)
        closing.run.save_buffers.clear()
        closing.end()


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
    settle(run)
    outline = saving.whole_state.outline(run, model, optimizer)
    with together(run, f"load_ckpt from {load_dir}"):
        path = find_native(load_dir, tag) or find_checkpoint(load_dir, tag)
        loaded = load_state(
            path,
            model=outline.model,
            optimizer=outline.optimizer,
            scheduler=scheduler,
            strict=load_module_strict,
            load_optimizer=load_optimizer_states,
            load_scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            rank=run.world.rank,
            outline=not outline.holds_values,
        )
    saving.whole_state.put(run, model, optimizer, outline, load_optimizer_states and not load_module_only)
    if not load_module_only:
        run.models_initialised = loaded.counters.get("models_initialised", run.models_initialised)
        restore_sampler_positions(run, loaded.counters)
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


def together(run: RunState, operation: str) -> AbstractContextManager[None]:
    """What fails on one rank inside is an error on all of them."""
    return failing_together(bind(gathered, run), operation, CheckpointError)


def save_model(
    saving: Saving, /, model: Module, tokenizer: PretrainedTokenizer | None, output_dir: str | Path, **kwargs: object
) -> None:
    """``save_pretrained`` where the model has it, else one safetensors file with tied weights stored once."""
    refuse_unknown("save_model", kwargs)
    run, directory, plain = saving.run, Path(output_dir), unwrap_model(model)
    outline = saving.whole_state.outline(run, model, None)
    writes = run.world.rank == 0
    if not outline.holds_values:
        fill(outline, writes)
    with together(run, f"save_model to {output_dir}"):
        if writes:
            write_model(plain, outline.model, directory)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(directory))


def fill(outline: Outline, keep: bool) -> None:
    """Gathers every value into the outline; a rank that does not ``keep`` them only takes part."""
    values: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for name, tensor in outline.model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            value = outline.read(tensor)
            known[id(tensor)] = value.detach().to("cpu", copy=True) if keep else tensor
        values[name] = known[id(tensor)]
    if keep:
        outline.model.load_state_dict(values, strict=False, assign=True)


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
    outline = saving.whole_state.outline(saving.run, model, None)
    with together(saving.run, f"load_model from {path}"):
        read_model(outline, source, map_location, strict, key_replace_fn)
    saving.whole_state.put(saving.run, model, None, outline, False)


def read_model(
    outline: Outline,
    source: Path,
    map_location: str,
    strict: bool,
    key_replace_fn: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None,
) -> None:
    """The weights in the files of ``source``, into an outline, or a whole model."""
    plain = outline.model
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
    fitting = {name: weights[name] for name in own if name in weights}
    plain.load_state_dict(fitting, strict=False, assign=not outline.holds_values)
