"""What an engine's model takes: the names and shapes of its weights, from its config alone.

vLLM and SGLang are given weights by name, and neither says reliably what it could not use: SGLang reports success for a
name that it does not know and dies of a wrong shape. So both are looked at before anything is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightrft.errors import EngineError, listed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Shape = tuple[int, ...]


def expected_weights(config_directory: str | Path) -> dict[str, Shape]:
    """The shape of every parameter by its name in the plain Hugging Face model; a tied one under each of its names."""
    return {
        name: tuple(parameter.shape)
        for name, parameter in model_without_memory(config_directory).named_parameters(remove_duplicate=False)
    }


def first_names(config_directory: str | Path) -> dict[str, str]:
    """For every name of :func:`expected_weights` the first name of the same parameter: another one only where it is tied."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model_without_memory(config_directory).named_parameters(remove_duplicate=False)
    }


def refuse_misfits(engine: str, expected: Mapping[str, Shape], named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises one ``EngineError`` that lists every tensor whose name or shape the model does not have."""
    problems = []
    for name, tensor in named_tensors:
        if name not in expected:
            problems.append(f"it has no parameter {name!r}: pass the names of the plain, unwrapped model")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name!r} is of shape {expected[name]}, got {tuple(tensor.shape)}: pass whole parameters")
    if problems:
        raise EngineError(f"engine {engine!r} was given weights that are not its model's:{listed(problems)}")


@frozen
class Model:
    """What a Hugging Face config directory says of the model, as far as requests are checked against it."""

    vocab_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]


def write_config(model: Module, directory: Path) -> None:
    """The config of a Hugging Face model as a directory that an engine can start from, without weights.

    Raises ``EngineError`` for a module that has no such config.
    """
    config: PreTrainedConfig | None = getattr(model, "config", None)
    if config is None or not callable(getattr(config, "save_pretrained", None)):
        raise EngineError(
            f"an engine needs a Hugging Face model with a config, got {type(model).__name__}. "
            f"Load it with AutoModelForCausalLM, or choose another engine."
        )
    config.save_pretrained(directory)
    path = directory / "config.json"
    content = json.loads(path.read_text())
    # FSDP2 makes a class of its own out of the model's; a config that never was saved names none.
    plain = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    content["architectures"] = [plain.__name__]
    path.write_text(json.dumps(content, indent=2))
    generation: PreTrainedConfig | None = getattr(model, "generation_config", None)
    if generation is not None:
        # What ends a sequence, and nothing of the sampling that was shipped with the model.
        ends = {name: getattr(generation, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (directory / "generation_config.json").write_text(json.dumps(ends))


def model_of(config_directory: str | Path) -> Model:
    """Read from ``config.json`` and, where there is one, ``generation_config.json``."""
    directory = Path(config_directory)
    text = _config(directory).get_text_config()
    generation = directory / "generation_config.json"
    named: list[int | list[int] | None] = [
        json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None,
        getattr(text, "eos_token_id", None),
    ]
    ends = (token for ids in named if ids is not None for token in ([ids] if isinstance(ids, int) else ids))
    return Model(text.vocab_size, getattr(text, "max_position_embeddings", None), tuple(dict.fromkeys(ends)))


def model_without_memory(config_directory: str | Path) -> Module:
    """The plain model that the config describes, its parameters on the meta device; tied ones are tied."""
    import transformers

    config = _config(Path(config_directory))
    kinds = [getattr(transformers, name, None) for name in config.architectures or ()]
    kind = next((kind for kind in kinds if kind is not None), transformers.AutoModelForCausalLM)
    make = cast("Callable[..., Module]", getattr(kind, "_from_config", None) or kind.from_config)  # left untyped there
    with torch.device("meta"):
        model = make(config)
    cast("Callable[[], None]", model.tie_weights)()
    return model


def _config(directory: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    if not (directory / "config.json").exists():
        raise EngineError(f"{directory} holds no config.json. Pass a Hugging Face model directory, or actor=model.")
    return cast("PreTrainedConfig", AutoConfig.from_pretrained(directory))
