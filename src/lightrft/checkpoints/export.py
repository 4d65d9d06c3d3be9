"""Turns a checkpoint into a directory that Hugging Face's ``from_pretrained`` loads: no GPU, no process group."""

from __future__ import annotations

import json
import logging
import math
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

import torch
from attrs import frozen
from safetensors.torch import save_file
from torch import Tensor

from lightrft.checkpoints.deepspeed_native import find_native, fp32_weights
from lightrft.checkpoints.layout import find_checkpoint
from lightrft.checkpoints.manifest import MANIFEST
from lightrft.checkpoints.state import MODEL
from lightrft.checkpoints.tensors import read_tensors
from lightrft.errors import CheckpointError, listed, missing

if TYPE_CHECKING:
    from torch.nn import Module

logger = logging.getLogger(__name__)

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_STALE = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_*", "config.json")
_LORA_A, _LORA_B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
_PEFT_PREFIX = "base_model.model."

DtypeName = Literal["float32", "bfloat16"]


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def save_pretrained(self, save_directory: str, /) -> object: ...


class LoadBase(Protocol):
    """The model whose configuration is wanted, and its tokenizer. The weights it has are not used."""

    def __call__(self, spec: str, /) -> tuple[Module, Tokenizer]: ...


@frozen
class Exported:
    """What was written."""

    directory: Path
    source: Path
    """The checkpoint's own directory."""
    kind: Literal["model", "adapter", "weights"]
    """A whole model, a PEFT adapter, or bare weights, since no architecture was known."""
    parameters: int


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    load_base: LoadBase,
    dtype: DtypeName = "float32",
    merge: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Writes ``out`` whole or not at all. With ``overwrite`` the new files take the places of old ones at the end.

    ``checkpoint``: a checkpoint's directory, one of several checkpoints (its latest is taken), a run of ``lightrft
    train``, or what DeepSpeed itself saved. ``model``: what ``load_base`` knows it by, or a directory with the
    ``adapter_config.json`` of the adapter; None for bare weights. ``merge``: weights of an adapter are added to those
    it adapts. Floating-point weights are stored as ``dtype``, tied ones once.

    Raises ``CheckpointError``: a damaged checkpoint, weights that are not those of the model, ``out`` not empty.
    """
    target = Path(out)
    source, weights = _weights(Path(checkpoint))
    _refuse_occupied(target, source, overwrite)
    weights = _from_adapter_on(_converted(weights, getattr(torch, dtype)))
    partial = target.absolute().with_name(f".{target.absolute().name}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        if any(name.endswith(_LORA_A) for name in weights) and not merge:
            kind: Literal["model", "adapter", "weights"] = "adapter"
            weights = _write_adapter(partial, weights, model)
        else:
            if merge:
                weights, model = _merged(weights, model)
            kind = "weights" if model is None else "model"
            if model is None:
                save_file(_once(weights), partial / MODEL, metadata={"format": "pt"})
            else:
                _write_model(partial, weights, model, load_base)
        _put_in_place(partial, target)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(target, source, kind, sum(tensor.numel() for tensor in _once(weights).values()))


# --- what is read


def _weights(checkpoint: Path) -> tuple[Path, dict[str, Tensor]]:
    """The checkpoint's directory, verified, and its weights under all their names; tied ones are one tensor."""
    if (checkpoint / MANIFEST).exists():
        path = find_checkpoint(checkpoint.resolve().parent, checkpoint.resolve().name)
    elif find_native(checkpoint) is not None:
        return checkpoint, fp32_weights(checkpoint)
    else:
        inner = checkpoint / "checkpoints"
        path = find_checkpoint(inner if inner.is_dir() else checkpoint)
    return path, read_tensors(path / MODEL).named()


def _converted(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point tensors in ``dtype``; what was one tensor still is."""
    made: dict[int, Tensor] = {}
    for tensor in weights.values():
        if id(tensor) not in made:
            made[id(tensor)] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return {name: made[id(tensor)] for name, tensor in weights.items()}


def _once(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors under their first name."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(id(tensor), name)
    return {name: weights[name].contiguous() for name in first.values()}


# --- a whole model


def skeleton(spec: str) -> tuple[Module, Tokenizer]:
    """A model without values, and the tokenizer, of a Hugging Face directory that need not hold weights."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    except ImportError as error:
        raise missing("transformers", "train", f"the model {spec!r}") from error
    try:
        config = AutoConfig.from_pretrained(spec)
        tokenizer = AutoTokenizer.from_pretrained(spec)
        with torch.device("meta"):
            from_config = cast("Callable[[object], Module]", AutoModelForCausalLM.from_config)
            model = from_config(config)
        if (Path(spec) / "generation_config.json").exists():
            setattr(model, "generation_config", GenerationConfig.from_pretrained(spec))  # noqa: B010  not a module's
    except Exception as error:  # a damaged file raises whatever its parser does
        raise CheckpointError(
            f"{spec} is no directory with config.json and tokenizer of a language model: {str(error).strip()[:300]}"
        ) from error
    return model, cast(Tokenizer, tokenizer)


def _write_model(directory: Path, weights: Mapping[str, Tensor], spec: str, load_base: LoadBase) -> None:
    model, tokenizer = load_base(spec)
    own = model.state_dict(keep_vars=True)
    weights = _named_as(weights, set(own))
    _refuse_misfits(weights, own, spec)
    model.load_state_dict(weights, strict=False, assign=True)
    for method in ("tie_weights", "eval"):
        cast(Callable[[], object], getattr(model, method))()
    save_pretrained: Callable[[str], object] = cast("Callable[[str], object]", getattr(model, "save_pretrained"))  # noqa: B009
    save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))


def _named_as(weights: Mapping[str, Tensor], own: set[str]) -> Mapping[str, Tensor]:
    """``weights`` without what wrappers put before each name (``module.``, ``_orig_mod.``, an actor's ``model.``)."""
    stripped = dict(weights)
    while stripped and not own & stripped.keys():
        first = {name.partition(".")[0] for name in stripped}
        if len(first) != 1 or not all("." in name for name in stripped):
            return weights
        stripped = {name.partition(".")[2]: tensor for name, tensor in stripped.items()}
    return stripped


def _refuse_misfits(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], spec: str) -> None:
    """Every weight of the model must be there, once, in its shape."""
    holders: dict[int, str] = {}
    for name in weights.keys() & own.keys():
        holders.setdefault(id(own[name]), name)
    problems = [f"missing in the checkpoint: {name}" for name in own if id(own[name]) not in holders]
    problems += [f"not in the model: {name}" for name in weights if name not in own]
    for name, tensor in weights.items():
        if name not in own:
            continue
        if tensor.shape != own[name].shape:
            problems.append(f"{name}: {tuple(tensor.shape)} in the checkpoint, {tuple(own[name].shape)} in the model")
        elif not torch.equal(tensor, weights[holders[id(own[name])]]):
            problems.append(f"{name}: tied to {holders[id(own[name])]} in the model, and another one in the checkpoint")
    if problems:
        rest = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(
            f"the checkpoint is not of the model {spec!r}:{listed(problems[:20])}{rest}\nName the model it was trained from."
        )


# --- adapters


def _from_adapter_on(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what wrappers put before the names of PEFT's."""
    return {_PEFT_PREFIX * (_PEFT_PREFIX in name) + name.rpartition(_PEFT_PREFIX)[2]: weights[name] for name in weights}


def _adapter_config(model: str | None) -> dict[str, object]:
    file = None if model is None else Path(model) / ADAPTER_CONFIG
    if file is None or not file.is_file():
        raise CheckpointError(
            "this is the checkpoint of a PEFT model, and how its adapter is scaled is not in it. Pass --model a directory "
            f"with its {ADAPTER_CONFIG}: save_model, or PEFT's save_pretrained, writes one."
        )
    try:
        config: object = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file} is not the configuration of a LoRA adapter, the only kind that is exported.")
    return config


def _write_adapter(directory: Path, weights: Mapping[str, Tensor], model: str | None) -> dict[str, Tensor]:
    """The adapter alone, as PEFT writes it."""
    config = _adapter_config(model)
    _refuse_other_adapters(weights, config)
    kept = {
        name.replace(".default.", "."): tensor for name, tensor in weights.items() if name.endswith((_LORA_A, _LORA_B))
    }
    save_file(_once(kept), directory / ADAPTER, metadata={"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return kept


def _merged(weights: Mapping[str, Tensor], model: str | None) -> tuple[dict[str, Tensor], str]:
    """The weights with the adapter in them, named as in the model beneath; and what that model is known by.

    W + B A lora_alpha / r (Hu et al. 2021, arXiv 2106.09685, section 4.1), or / sqrt(r) with rsLoRA.
    """
    if not any(name.endswith(_LORA_A) for name in weights):
        raise CheckpointError("--merge: this checkpoint holds no adapter. Leave out --merge.")
    config = _adapter_config(model)
    _refuse_other_adapters(weights, config)
    alpha, base = config.get("lora_alpha"), config.get("base_model_name_or_path")
    if not isinstance(alpha, int | float) or not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{model}/{ADAPTER_CONFIG} lacks lora_alpha or base_model_name_or_path: merging needs both."
        )
    merged = {}
    for name, tensor in weights.items():
        if name.endswith((_LORA_A, _LORA_B)):
            continue
        stem = name.partition(_BASE)[0]
        if name == f"{stem}{_BASE}weight":
            down, up = weights[stem + _LORA_A], weights[stem + _LORA_B]
            rank = down.shape[0]
            scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
            tensor = (tensor.double() + scale * (up.double() @ down.double())).to(tensor.dtype)
        merged[name.replace(_BASE, ".").removeprefix(_PEFT_PREFIX)] = tensor
    return merged, base


def _refuse_other_adapters(weights: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """Only plain LoRA of linear layers, one adapter: a scale for each module, DoRA and the like are refused."""
    other = [name for name in weights if ".lora_" in name and not name.endswith((_LORA_A, _LORA_B))]
    other += [name for name in weights if ".modules_to_save." in name]
    settings = ("alpha_pattern", "rank_pattern", "fan_in_fan_out", "use_dora", "lora_bias", "use_qalora")
    told = [f"{name}={config[name]!r}" for name in settings if config.get(name)]
    if other or told:
        raise CheckpointError(
            f"this adapter is not a plain LoRA of linear layers, the only kind that is exported:{listed([*other[:5], *told])}"
            "\nLoad the checkpoint into its PEFT model and use save_model."
        )


# --- where it goes


def _refuse_occupied(target: Path, source: Path, overwrite: bool) -> None:
    here, there = target.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(f"{target} and the checkpoint {source} lie in each other. Choose another directory.")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file. Name a directory.")
    if target.exists() and any(target.iterdir()) and not overwrite:
        raise CheckpointError(
            f"{target} is not empty. Pass --overwrite to replace the model in it, or another directory."
        )


def _put_in_place(partial: Path, target: Path) -> None:
    """Renames, or replaces the files of a model in ``target``, leaving what is not a model's alone."""
    if not target.exists():
        partial.rename(target)
        return
    for pattern in _STALE:
        for file in target.glob(pattern):
            if file.is_file():
                file.unlink()
    for file in partial.iterdir():
        file.replace(target / file.name)
