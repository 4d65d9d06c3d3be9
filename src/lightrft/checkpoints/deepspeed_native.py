"""Reads the directories that DeepSpeed's own ``engine.save_checkpoint`` writes: ZeRO 0 to 3, any number of ranks.

::

    <directory>/latest                                                    the tag
    <directory>/<tag>/mp_rank_00_model_states.pt                          stages 0 to 2: the module's state_dict, names
    <directory>/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt         stage 3: the same, with no parameters in it
    <directory>/<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt  stages 1 to 3: rank r's piece of the fp32
                                                                          weights and of the optimizer's moments

These are pickles, and they name classes of DeepSpeed's. None of its code is run, nor need it be installed: the few
classes that the files hold are read as objects without content, anything else is refused (law K9).

At stages 1 and 2 the parameters of a group lie one after the other in a flat tensor, of which rank r has the r-th piece.
At stage 3 each parameter is cut into one piece a rank, the last one padded, and a rank's pieces lie one after the other.
Source: ``deepspeed/utils/zero_to_fp32.py`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import field, frozen
from torch import Tensor

from lightrft.checkpoints.manifest import LATEST, MANIFEST, tag_problem
from lightrft.checkpoints.tensors import storage_key
from lightrft.errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MODEL_FILES = "*mp_rank_*_model_states.pt"
PARTITION_FILES = "*mp_rank_*_optim_states.pt"
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError)


class Inert:
    """Stands for an object of DeepSpeed's: what was in it is dropped."""

    def __new__(cls, *args: object) -> Inert:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Keeps nothing."""


_STAND_INS: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
]


@frozen(eq=False)
class Partition:
    """What one rank holds, a flat tensor for each group of parameters (at stage 3: for each sub-group)."""

    stage: int
    count: int
    weights: list[Tensor]
    paddings: list[list[int]] | None
    """Elements left out after each parameter, by group."""
    moments: Mapping[str, list[Tensor]] = field(factory=dict)
    step: int | None = None


@frozen(eq=False)
class Names:
    """What a model file says of the parameters."""

    module: Mapping[str, Tensor]
    """The module's state_dict; at stage 3 buffers only."""
    shapes: list[Mapping[str, torch.Size]]
    """Of the partitioned parameters: for each group by name, in the order in which they lie."""
    shared: Mapping[str, str]
    """Tied parameters: the name that is not stored, and the one that is."""
    frozen_shapes: Mapping[str, torch.Size]
    frozen_pieces: Mapping[str, Tensor]
    updates: int


# --- what is asked


def find_native(directory: str | Path, tag: str | None = None) -> Path | None:
    """Where the files of a checkpoint lie that DeepSpeed itself wrote; None if there is no such one. Reads names only.

    ``directory`` holds tags (without ``tag`` it is the one in ``latest``), or is itself that of a tag.
    """
    try:
        return _tag_directory(Path(directory), tag)
    except CheckpointError:
        return None


def fp32_weights(directory: str | Path, tag: str | None = None) -> dict[str, Tensor]:
    """The whole weights by name, on the CPU: parameters, frozen ones and buffers, floating-point ones as float32.

    ``directory`` holds tags (without ``tag`` the one in ``latest`` is read), or is itself that of a tag. Tied parameters
    are one tensor under each name. Where DeepSpeed kept fp32 weights beside half-precision ones, these are read.

    Raises ``CheckpointError`` naming the file and the reason: nothing there, pieces of ranks missing, tensor, pipeline
    or expert parallelism, or a pickle that would have to run code.
    """
    source = _tag_directory(Path(directory), tag)
    names, partitions = _names(source), _partitions(source)
    weights: dict[str, Tensor] = {}
    known: dict[object, Tensor] = {}
    for name, tensor in names[0].module.items():
        if not (partitions and partitions[0].stage == 3 and tensor.numel() == 0):
            made = tensor.float() if tensor.is_floating_point() else tensor
            weights[name] = known.setdefault(storage_key(tensor), made)
    if not partitions and any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in names[0].module.values()):
        logger.warning("%s: stage 0 stores half-precision weights, which are now float32 without having more", source)
    weights.update(_frozen(names))
    if partitions:
        weights.update(_whole(source, [part.weights for part in partitions], partitions[0], names[0].shapes))
    for alias, name in names[0].shared.items():
        if name in weights:
            weights[alias] = weights[name]
    return weights


def optimizer_moments(directory: str | Path, tag: str | None = None) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by parameter name: ``exp_avg``, ``exp_avg_sq`` and whatever else has an element for each of
    the parameter's, whole and float32, and ``step``, a scalar, where it is kept.

    Empty at stage 0, whose files have the state by position and do not say which parameter has which, and before the
    first update. Errors as in :func:`fp32_weights`.
    """
    source = _tag_directory(Path(directory), tag)
    partitions = _partitions(source)
    if not partitions:
        return {}
    names = _names(source)
    found: dict[str, dict[str, Tensor]] = {}
    for key in partitions[0].moments:
        try:
            pieces = [part.moments[key] for part in partitions]
        except KeyError as error:
            raise CheckpointError(f"{source}: only some ranks have the optimizer's {error}. Copy all of it.") from error
        for name, tensor in _whole(source, pieces, partitions[0], names[0].shapes).items():
            found.setdefault(name, {})[key] = tensor
    if (step := partitions[0].step) is not None:
        for state in found.values():
            state["step"] = torch.tensor(float(step))
    return found


def updates(directory: str | Path, tag: str | None = None) -> int:
    """How many updates the optimizer had made. Errors as in :func:`fp32_weights`."""
    return _names(_tag_directory(Path(directory), tag))[0].updates


# --- pieces put together


def _whole(
    source: Path, pieces: Sequence[Sequence[Tensor]], like: Partition, shapes: Sequence[Mapping[str, torch.Size]]
) -> dict[str, Tensor]:
    """Tensors by name, out of ``pieces[rank][group]``."""
    try:
        whole = _cut_by_parameter(pieces, shapes) if like.stage == 3 else _cut_by_rank(pieces, shapes, like.paddings)
    except _MALFORMED as error:
        raise CheckpointError(f"{source}: the pieces do not make up the parameters: {error}") from error
    return {name: tensor.float() for name, tensor in whole.items()}


def _cut_by_rank(
    pieces: Sequence[Sequence[Tensor]],
    shapes: Sequence[Mapping[str, torch.Size]],
    paddings: Sequence[Sequence[int]] | None,
) -> dict[str, Tensor]:
    """Stages 1 and 2."""
    whole = {}
    for group, members in enumerate(shapes):
        flat = torch.cat([piece[group].reshape(-1) for piece in pieces])
        gaps = [0] * len(members) if paddings is None else paddings[group]
        offset = 0
        for (name, shape), gap in zip(members.items(), gaps, strict=True):
            whole[name] = flat.narrow(0, offset, math.prod(shape)).reshape(shape)
            offset += math.prod(shape) + gap
    return whole


def _cut_by_parameter(
    pieces: Sequence[Sequence[Tensor]], shapes: Sequence[Mapping[str, torch.Size]]
) -> dict[str, Tensor]:
    """Stage 3."""
    flats = [torch.cat([part.reshape(-1) for part in groups]) for groups in pieces]
    whole, offset = {}, 0
    for name, shape in ((name, shape) for members in shapes for name, shape in members.items()):
        length = -(-math.prod(shape) // len(flats))
        padded = torch.cat([flat.narrow(0, offset, length) for flat in flats])
        whole[name] = padded[: math.prod(shape)].reshape(shape)
        offset += length
    if any(flat.numel() != offset for flat in flats):
        raise ValueError(f"{offset} elements are needed of each rank, there are {[flat.numel() for flat in flats]}")
    return whole


def _frozen(names: Sequence[Names]) -> dict[str, Tensor]:
    """Parameters that are not trained: whole below stage 3, else cut into a piece for each rank."""
    found = {}
    for name, shape in names[0].frozen_shapes.items():
        flat = torch.cat([each.frozen_pieces[name].reshape(-1) for each in names])
        found[name] = flat[: math.prod(shape)].reshape(shape).float()
    return found


# --- files


def _tag_directory(directory: Path, tag: str | None) -> Path:
    """The directory that holds the files."""
    if tag is None and not any(directory.glob(MODEL_FILES)):
        try:
            tag = (directory / LATEST).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise CheckpointError(
                f"{directory} holds no checkpoint of DeepSpeed's: no {LATEST}, no model files."
            ) from error
    if tag is not None and (problem := tag_problem(tag)):
        raise CheckpointError(f"{directory}: the tag {tag!r} {problem}. Name one of the directories in it.")
    source = directory if tag is None else directory / tag
    if (source / MANIFEST).exists() or not any(source.glob(MODEL_FILES)):
        raise CheckpointError(f"{source} holds no checkpoint of DeepSpeed's: no {MODEL_FILES}.")
    return source


def _pp_rank(file: Path) -> int:
    found = re.search(r"pp_rank_(\d+)_", file.name)
    return int(found.group(1)) if found else 0


def _files(source: Path, pattern: str) -> list[Path]:
    """In rank order."""
    files = list(source.glob(pattern))
    foreign = [
        file.name for file in files if not re.fullmatch(r"(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_00_.*", file.name)
    ]
    foreign += [file.name for file in source.glob("layer_*_states.pt")]
    if foreign:
        raise CheckpointError(
            f"{source} was written with tensor, pipeline or expert parallelism ({sorted(foreign)[0]}), which is not read "
            "here. Convert it with DeepSpeed's ds_to_universal.py."
        )
    return sorted(files, key=_pp_rank)


def _names(source: Path) -> list[Names]:
    """Of every model file: one, or at stage 3 one a rank."""
    return [_read(file, _as_names) for file in _files(source, MODEL_FILES)]


def _partitions(source: Path) -> list[Partition]:
    """In rank order; none at stage 0. ``CheckpointError`` if one is missing."""
    partitions = [_read(file, _as_partition) for file in _files(source, PARTITION_FILES)]
    if partitions and partitions[0].count != len(partitions):
        raise CheckpointError(
            f"{source} holds the pieces of {len(partitions)} ranks, and {partitions[0].count} wrote it. Copy all of them."
        )
    return partitions


def _read(file: Path, make: Callable[[Mapping[str, Any]], T]) -> T:
    """What ``make`` finds in a pickle, no code of which is run."""
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{file} is not read: {f'it holds an object of {name.group(1)}' if name else 'it holds foreign objects'}, and "
            "its code would have to run. If you trust whoever wrote it, convert it with the script that DeepSpeed left "
            "beside it, and load what that writes with load_model:\n\n"
            f"  python {file.parent.parent / 'zero_to_fp32.py'} {file.parent.parent} OUT --tag {file.parent.name} "
            "--safe_serialization"
        ) from error
    except (OSError, EOFError, *_MALFORMED) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        return make(content)
    except _MALFORMED as error:
        raise CheckpointError(f"{file} is not as DeepSpeed writes it: {error!r}") from error


def _as_names(content: Mapping[str, Any]) -> Names:
    if not all(isinstance(value, Tensor) for value in content["module"].values()):
        raise TypeError("the module's state_dict holds other things than tensors")
    return Names(
        module=content["module"],
        shapes=[dict(members) for members in content.get("param_shapes") or ()],
        shared=dict(content.get("shared_params") or {}),
        frozen_shapes=dict(content.get("frozen_param_shapes") or {}),
        frozen_pieces=dict(content.get("frozen_param_fragments") or {}),
        updates=int(content.get("global_steps") or 0),
    )


def _as_partition(content: Mapping[str, Any]) -> Partition:
    held = content["optimizer_state_dict"]
    # The optimizer for bfloat16 with fp32 gradients has its partitions as stage 1 has, and names no stage.
    stage = int(held.get("zero_stage", 1))
    weights = list(held["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"])
    count = held["partition_count"]
    moments, step = _as_moments(held["optimizer_state_dict" if stage == 3 else "base_optimizer_state"], weights)
    return Partition(
        stage=stage,
        count=max(count) if isinstance(count, list) else int(count),
        weights=weights,
        paddings=held.get("param_alignment_paddings"),
        moments=moments,
        step=step,
    )


def _as_moments(saved: Any, weights: Sequence[Tensor]) -> tuple[dict[str, list[Tensor]], int | None]:
    """Torch's state of an optimizer whose parameters are the flat groups; at elastic checkpoints a list of it."""
    by_group = dict(enumerate(saved)) if isinstance(saved, list) else saved["state"]
    if len(by_group) != len(weights):  # not updated yet
        return {}, None
    moments = {
        key: [by_group[group][key] for group in range(len(weights))]
        for key, value in by_group[0].items()
        if isinstance(value, Tensor) and value.numel() >= max(1, weights[0].numel()) and value.dim() == 1
    }
    step = by_group[0].get("step")
    return moments, None if step is None else int(step)
