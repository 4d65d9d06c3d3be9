"""Faults of checkpoints: what a load forgets, what a rotation takes, what a failed save leaves."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import nn

from lightrft.backends import fake
from lightrft.errors import CheckpointError
from lightrft.strategy.record import StrategyRecord
from mutants.mutant import Mutant


def loaded_with(strategy: StrategyRecord, **told: Any) -> StrategyRecord:
    """``load_ckpt`` with these options, whatever the caller asks for."""

    def load_ckpt(*args: Any, **kwargs: Any) -> Any:
        return strategy.load_ckpt(*args, **{**kwargs, **told})

    return evolve(strategy, load_ckpt=load_ckpt)


def moments_forgotten(strategy: StrategyRecord) -> StrategyRecord:
    return loaded_with(strategy, load_optimizer_states=False)


def schedule_forgotten(strategy: StrategyRecord) -> StrategyRecord:
    return loaded_with(strategy, load_lr_scheduler_states=False)


def never_strict(strategy: StrategyRecord) -> StrategyRecord:
    return loaded_with(strategy, load_module_strict=False)


def more_than_the_module(strategy: StrategyRecord) -> StrategyRecord:
    return loaded_with(strategy, load_module_only=False)


def around_load(strategy: StrategyRecord, before: Callable[[nn.Module], Any], after: Any) -> StrategyRecord:
    """``after`` is given what ``before`` saw, and makes another result of the load's."""

    def load_ckpt(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen = before(model)
        return after(seen, model, strategy.load_ckpt(model, *args, **kwargs))

    return evolve(strategy, load_ckpt=load_ckpt)


def rng_forgotten(strategy: StrategyRecord) -> StrategyRecord:
    def restore(seen: Any, model: nn.Module, result: Any) -> Any:
        torch.set_rng_state(seen[0])
        np.random.set_state(seen[1])
        random.setstate(seen[2])
        return result

    return around_load(
        strategy, lambda model: (torch.get_rng_state(), np.random.get_state(), random.getstate()), restore
    )


def rng_of_rank_0(strategy: StrategyRecord) -> StrategyRecord:
    def restore(seen: Any, model: nn.Module, result: Any) -> Any:
        torch.set_rng_state(strategy.broadcast(torch.get_rng_state()))
        return result

    return around_load(strategy, lambda model: None, restore)


def buffers_forgotten(strategy: StrategyRecord) -> StrategyRecord:
    def restore(seen: Any, model: nn.Module, result: Any) -> Any:
        for buffer, old in zip(model.buffers(), seen, strict=True):
            buffer.copy_(old)
        return result

    return around_load(strategy, lambda model: [buffer.clone() for buffer in model.buffers()], restore)


def client_state_forgotten(strategy: StrategyRecord) -> StrategyRecord:
    return around_load(strategy, lambda model: None, lambda seen, model, result: (result[0], {}))


def tensors_as_lists(strategy: StrategyRecord) -> StrategyRecord:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return value.float() if isinstance(value, torch.Tensor) else value

    return around_load(strategy, lambda model: None, lambda seen, model, result: (result[0], plain(result[1])))


def untied_by_a_load(strategy: StrategyRecord) -> StrategyRecord:
    def untie(seen: Any, model: Any, result: Any) -> Any:
        if hasattr(model, "lm_head"):
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return result

    return around_load(strategy, lambda model: None, untie)


def loads_half_and_raises(strategy: StrategyRecord) -> StrategyRecord:
    def load_ckpt(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return strategy.load_ckpt(model, *args, **kwargs)
        except CheckpointError:
            with torch.no_grad():
                next(model.parameters()).mul_(2)
            raise

    return evolve(strategy, load_ckpt=load_ckpt)


def updates_counted_anew(strategy: StrategyRecord) -> StrategyRecord:
    """Saves name the updates since the load."""
    updates: list[bool] = []

    def optimizer_step(*args: Any, **kwargs: Any) -> Any:
        outcome = strategy.optimizer_step(*args, **kwargs)
        updates.extend([True] * outcome.applied)
        return outcome

    def save_ckpt(model: nn.Module, save_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> None:
        strategy.save_ckpt(model, save_dir, f"step{len(updates)}" if tag is None else tag, *args, **kwargs)

    return evolve(strategy, optimizer_step=optimizer_step, save_ckpt=save_ckpt)


def loaders_forgotten(strategy: StrategyRecord) -> StrategyRecord:
    other = fake.build(strategy.config)
    return evolve(strategy, setup_dataloader=other.setup_dataloader)


def highest_name_is_latest(strategy: StrategyRecord) -> StrategyRecord:
    def load_ckpt(model: nn.Module, load_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if tag is None and Path(load_dir).is_dir():
            tag = max((path.name for path in tags_in(Path(load_dir))), default=None)
        return strategy.load_ckpt(model, load_dir, tag, *args, **kwargs)

    return evolve(strategy, load_ckpt=load_ckpt)


def damage_overlooked(strategy: StrategyRecord) -> StrategyRecord:
    """What cannot be loaded is passed over in silence."""

    def load_ckpt(model: nn.Module, load_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return strategy.load_ckpt(model, load_dir, tag, *args, **kwargs)
        except CheckpointError:
            return str(Path(load_dir) / (tag or "")), {}

    return evolve(strategy, load_ckpt=load_ckpt)


# --------------------------------------------------------------------------------------------------------------- saves


def tags_in(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")]


def number_in(path: Path) -> int:
    digits = "".join(letter for letter in path.name if letter.isdigit())
    return int(digits) if digits else 0


def rotated(
    strategy: StrategyRecord, order: Callable[[Path], Any], *, first: bool = False, foreign: bool = False, most: int = 0
) -> StrategyRecord:
    """Rotation goes by ``order`` and not by the commit; ``first``: before the save, for which it makes room."""

    def save_ckpt(
        model: nn.Module, save_dir: Any, tag: str | None = None, max_num: int = 3, *args: Any, **kwargs: Any
    ) -> None:
        root = Path(save_dir)

        def rotate(keep: int) -> None:
            found = [path for path in tags_in(root) if foreign or path.name != "notes"] if root.is_dir() else []
            for path in sorted(found, key=order)[: max(len(found) - keep, 0)]:
                shutil.rmtree(path)

        if first and max_num > 0:
            rotate(max_num - 1)
        strategy.save_ckpt(model, save_dir, tag, max_num if first else 0, *args, **kwargs)
        if not first and max_num > 0:
            rotate(max_num + most)

    return evolve(strategy, save_ckpt=save_ckpt)


def rotation_by_name(strategy: StrategyRecord) -> StrategyRecord:
    return rotated(strategy, lambda path: path.name)


def rotation_by_number(strategy: StrategyRecord) -> StrategyRecord:
    return rotated(strategy, number_in)


def rotation_by_time(strategy: StrategyRecord) -> StrategyRecord:
    return rotated(strategy, lambda path: path.stat().st_mtime)


def rotation_before_the_save(strategy: StrategyRecord) -> StrategyRecord:
    return rotated(strategy, lambda path: path.stat().st_ctime, first=True)


def rotation_takes_all(strategy: StrategyRecord) -> StrategyRecord:
    return rotated(strategy, lambda path: path.stat().st_ctime, most=-1)


def one_too_many_kept(strategy: StrategyRecord) -> StrategyRecord:
    return rotated(strategy, lambda path: path.stat().st_ctime, most=1)


def rotation_takes_what_is_not_ours(strategy: StrategyRecord) -> StrategyRecord:
    return rotated(strategy, lambda path: (path.name != "notes", path.stat().st_ctime), foreign=True)


def every_save_counts(strategy: StrategyRecord) -> StrategyRecord:
    saves: list[str] = []

    def save_ckpt(
        model: nn.Module, save_dir: Any, tag: str | None = None, max_num: int = 3, *args: Any, **kwargs: Any
    ) -> None:
        strategy.save_ckpt(model, save_dir, tag, 0, *args, **kwargs)
        saves.append(str(tag))
        for old in saves[: max(len(saves) - max_num, 0)] if max_num > 0 else []:
            if old != tag:
                shutil.rmtree(Path(save_dir) / old, ignore_errors=True)

    return evolve(strategy, save_ckpt=save_ckpt)


def latest_before_the_commit(strategy: StrategyRecord) -> StrategyRecord:
    def save_ckpt(model: nn.Module, save_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> None:
        if tag is not None and (Path(save_dir) / tag).is_dir():
            (Path(save_dir) / "latest").write_text(tag)
        strategy.save_ckpt(model, save_dir, tag, *args, **kwargs)

    return evolve(strategy, save_ckpt=save_ckpt)


def latest_never_written(strategy: StrategyRecord) -> StrategyRecord:
    def save_ckpt(model: nn.Module, save_dir: Any, *args: Any, **kwargs: Any) -> None:
        had = Path(save_dir) / "latest"
        before = had.read_text() if had.is_file() else None
        strategy.save_ckpt(model, save_dir, *args, **kwargs)
        if before is not None:
            had.write_text(before)

    return evolve(strategy, save_ckpt=save_ckpt)


def half_is_left_by_a_failed_save(strategy: StrategyRecord) -> StrategyRecord:
    def save_ckpt(model: nn.Module, save_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> None:
        try:
            strategy.save_ckpt(model, save_dir, tag, *args, **kwargs)
        except TypeError:
            (Path(save_dir) / str(tag)).mkdir(exist_ok=True)
            raise

    return evolve(strategy, save_ckpt=save_ckpt)


def failures_of_a_save_hidden(strategy: StrategyRecord) -> StrategyRecord:
    def save_ckpt(*args: Any, **kwargs: Any) -> None:
        with suppress(TypeError, CheckpointError):
            strategy.save_ckpt(*args, **kwargs)

    return evolve(strategy, save_ckpt=save_ckpt)


def tag_made_harmless(strategy: StrategyRecord) -> StrategyRecord:
    def save_ckpt(model: nn.Module, save_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> None:
        strategy.save_ckpt(model, save_dir, None if tag is None else tag.replace("../", ""), *args, **kwargs)

    return evolve(strategy, save_ckpt=save_ckpt)


def saved_when_there_is_time(strategy: StrategyRecord) -> StrategyRecord:
    """With ``async_save`` the state is read by whoever comes next, and not at the call."""
    waiting: list[Any] = []

    def settle() -> None:
        while waiting:
            args, kwargs = waiting.pop()
            strategy.save_ckpt(*args, **kwargs)

    def save_ckpt(*args: Any, **kwargs: Any) -> None:
        settle()
        if strategy.config.async_save:
            waiting.append((args, kwargs))
        else:
            strategy.save_ckpt(*args, **kwargs)

    def load_ckpt(*args: Any, **kwargs: Any) -> Any:
        settle()
        return strategy.load_ckpt(*args, **kwargs)

    return evolve(strategy, save_ckpt=save_ckpt, load_ckpt=load_ckpt)


def written_in_bf16(strategy: StrategyRecord) -> StrategyRecord:
    def save_model(model: nn.Module, tokenizer: Any, output_dir: Any, **kwargs: Any) -> None:
        strategy.save_model(copy.deepcopy(model).bfloat16(), tokenizer, output_dir, **kwargs)

    return evolve(strategy, save_model=save_model)


K1 = "K1 K2 FC28 FC29"
K5 = "K5"


def evaluated_models_stay(strategy: StrategyRecord) -> StrategyRecord:
    def load_ckpt(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(parameter.requires_grad for parameter in model.parameters()):
            return strategy.load_ckpt(model, *args, **kwargs)
        return "", {}

    return evolve(strategy, load_ckpt=load_ckpt)


MUTANTS = (
    Mutant("evaluated-models-stay", "what is only evaluated is not loaded", "K1: a model that is only", evaluated_models_stay),
    Mutant("moments-forgotten", "a load leaves the optimizer's state as it is", K1, moments_forgotten),
    Mutant("FC28-schedule-forgotten", "a load leaves the scheduler as it is", K1, schedule_forgotten),
    Mutant("rng-forgotten", "a load leaves the random states as they are", K1, rng_forgotten),
    Mutant("FC29-rng-of-rank-0", "a load gives all ranks the random state of rank 0", K1, rng_of_rank_0, "fsdp", 2),
    Mutant("client-state-forgotten", "a load gives no client_state back", K1, client_state_forgotten),
    Mutant("FC30-client-tensors-change", "tensors of client_state come back in another dtype", "K1 FC30", tensors_as_lists),
    Mutant("buffers-forgotten", "a load leaves the buffers as they are", "K1 FC30", buffers_forgotten),
    Mutant("updates-counted-anew", "after a load updates are counted from 0", "K1 FC30", updates_counted_anew),
    Mutant("loaders-forgotten", "a load leaves the data loaders at their beginning", "K1: a data", loaders_forgotten),
    Mutant("saved-when-there-is-time", "a save in the background reads what is trained meanwhile", "K2",
           saved_when_there_is_time),
    Mutant("FC10-untied-by-a-load", "a load unties lm_head from the embeddings", "K8", untied_by_a_load),
    Mutant("written-in-bf16", "save_model rounds weights to bfloat16", "K10", written_in_bf16),
    Mutant("never-strict", "keys that do not fit are passed over", "K7", never_strict),
    Mutant("more-than-the-module", "load_module_only loads the optimizer too", "K7", more_than_the_module),
    Mutant("loads-half-and-raises", "a load that fails has changed the model", "K6 K7", loads_half_and_raises),
    Mutant("FC27-damage-overlooked", "a checkpoint that is damaged is passed over in silence", "K6: damage",
           damage_overlooked),
    Mutant("FC31-tag-made-harmless", "a tag that leaves the directory is bent until it does not", "K6 K7",
           tag_made_harmless),
    Mutant("highest-name-is-latest", "a load without a tag takes the highest name", K5, highest_name_is_latest),
    Mutant("FC07-rotation-by-name", "rotation sorts by name", K5, rotation_by_name),
    Mutant("FC08-rotation-by-number", "rotation sorts by step number", K5, rotation_by_number),
    Mutant("FC25-rotation-by-time", "rotation sorts by time of modification", K5, rotation_by_time),
    Mutant("FC16-rotation-takes-all", "max_num 1 deletes everything", K5, rotation_takes_all),
    Mutant("FC09-one-too-many-kept", "max_num + 1 are left after a save", K5, one_too_many_kept),
    Mutant("FC45-every-save-counts", "a name that was saved five times counts five times", K5, every_save_counts),
    Mutant("rotation-takes-what-is-not-ours", "a directory that is no checkpoint is removed", K5,
           rotation_takes_what_is_not_ours),
    Mutant("latest-never-moves", "latest keeps naming the first", K5, latest_never_written),
    Mutant("FC26-latest-before-the-commit", "latest names a checkpoint before it is committed", "K4",
           latest_before_the_commit),
    Mutant("FC26-rotation-before-the-save", "room is made before the save has succeeded", "K4", rotation_before_the_save),
    Mutant("half-is-left-by-a-failed-save", "a save that failed leaves a directory under its tag", "K4",
           half_is_left_by_a_failed_save),
    Mutant("failures-of-a-save-hidden", "a save that failed says nothing", "K4", failures_of_a_save_hidden),
)  # fmt: skip
