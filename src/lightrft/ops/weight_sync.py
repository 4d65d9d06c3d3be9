"""From the trainer's parameters to the engine's weights: plain names, adapters merged, one after another (R2, R3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, cast

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from lightrft.engines.protocol import Engine, Request, Sampling
from lightrft.errors import EngineError, UnsupportedOperation

WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What ``torch.compile``, FSDP and activation checkpointing put into the names of what they wrap."""
PEFT_PREFIX = "base_model.model."
BASE, SAVED, ORIGINAL = "base_layer", "modules_to_save", "original_module"


def plain_name(name: str) -> str:
    """The name of a parameter in the user's own model: no wrapper and no adapter shows in it (FC32)."""
    parts = [part for part in name.split(".") if part not in WRAPPER_PARTS]
    while parts[0] == "module" and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts).removeprefix(PEFT_PREFIX)


def plain_weights(model: Module, named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of the plain model that computes what ``model`` does, adapters merged.

    ``named_weights`` are the parameters of ``model``, whole, by their names in it. With LoRA a weight is W + s B A (Hu et
    al., arXiv:2106.09685, eq. 3), in fp32 whatever the dtype of W, which itself is not touched (FC33); a layer is held
    until all of it has come, so that never more than one is in memory twice. Raises ``UnsupportedOperation`` for
    adapters that are not a sum.
    """
    layers = {name: adapted(name, module) for name, module in model.named_modules() if is_adapted(module)}
    awaited: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    saved = active_saved_modules(model)
    for name, tensor in named_weights:
        path, rest = layer_of(name, layers)
        if path is not None and rest in layers[path].parts:
            held = awaited[path]
            held[rest] = tensor
            if held.keys() == layers[path].parts:
                yield plain_name(f"{path}.weight"), merged(layers[path], awaited.pop(path))
        elif path is not None and rest.startswith(f"{BASE}."):
            yield plain_name(f"{path}.{rest.removeprefix(f'{BASE}.')}"), tensor
        elif path is None and (own := name_of_saved(name, saved)) is not None:
            yield plain_name(own), tensor
    if awaited := {path: held for path, held in awaited.items() if held}:
        raise EngineError(f"the adapters of {min(awaited)!r} came without what they adapt. Pass all parameters.")


def name_of_saved(name: str, saved: Mapping[str, str]) -> str | None:
    """A parameter by the name that it has without PEFT's copies of whole modules; None for a copy that is not in use."""
    for path, adapter in saved.items():
        if name.startswith(f"{path}."):
            rest = name.removeprefix(f"{path}.")
            in_use = f"{SAVED}.{adapter}." if adapter else f"{ORIGINAL}."
            return f"{path}.{rest.removeprefix(in_use)}" if rest.startswith(in_use) else None
    return name


# ------------------------------------------------------------------------------------------------------------ adapters


class LoraLayer(Protocol):
    """What is read of PEFT's layers."""

    active_adapters: list[str]
    scaling: Mapping[str, float]
    merged: bool
    fan_in_fan_out: bool


@frozen
class Adapted:
    """A layer with LoRA adapters that are in use."""

    scaling: Mapping[str, float]
    transposed: bool
    embeds: bool
    parts: frozenset[str]
    """Names below the layer of what its weight is made of."""


def is_adapted(module: Module) -> bool:
    """Whether PEFT has put itself around a layer."""
    return isinstance(getattr(module, BASE, None), Module)


def adapted(name: str, module: Module) -> Adapted:
    """What a layer's weight is made of."""
    if not hasattr(module, "lora_A"):
        raise not_a_sum(name, type(module).__name__)
    layer = cast(LoraLayer, module)
    own = [part for part, _ in module.named_parameters()]
    embeds = any(part.startswith("lora_embedding_A.") for part in own)
    in_use = [] if layer.merged or getattr(module, "disable_adapters", False) else list(layer.active_adapters)
    parts = {f"{BASE}.weight"}
    for adapter in in_use:
        factors = {part for part in own if part.startswith("lora_") and adapter in part.split(".")}
        known = {part.format(adapter) for part in (EMBEDDING_PARTS if embeds else LINEAR_PARTS)}
        if factors - known:
            raise not_a_sum(name, min(factors - known))
        parts |= factors
    scaling = {adapter: layer.scaling[adapter] for adapter in in_use if adapter in layer.scaling}
    base = module.get_submodule(BASE)
    if in_use and not embeds and hasattr(base, "kernel_size"):
        raise not_a_sum(name, f"of a {type(base).__name__}")
    return Adapted(scaling, bool(getattr(module, "fan_in_fan_out", False)), embeds, frozenset(parts))


LINEAR_PARTS = ("lora_A.{}.weight", "lora_B.{}.weight")
EMBEDDING_PARTS = ("lora_embedding_A.{}", "lora_embedding_B.{}")


def merged(layer: Adapted, parts: Mapping[str, Tensor]) -> Tensor:
    """W + s B A."""
    weight = parts[f"{BASE}.weight"]
    names = EMBEDDING_PARTS if layer.embeds else LINEAR_PARTS
    for adapter, scale in layer.scaling.items():
        a, b = (parts.get(name.format(adapter)) for name in names)
        if a is None or b is None:  # this layer has none of this adapter
            continue
        delta = scale * (b.float() @ a.float())
        weight = weight.float() + (delta.T if layer.transposed or layer.embeds else delta)
    return weight


def layer_of(name: str, layers: Mapping[str, Adapted]) -> tuple[str | None, str]:
    """The adapted layer that a parameter belongs to, and the parameter's name in it."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:length])
        if path in layers:
            return path, ".".join(parts[length:])
    return None, name


def active_saved_modules(model: Module) -> dict[str, str]:
    """Modules that PEFT keeps a whole copy of for training, and the adapter whose copy is in use; ``""``: none is."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, SAVED, None), Module) and isinstance(getattr(module, ORIGINAL, None), Module):
            adapters = list(cast(LoraLayer, module).active_adapters)
            found[name] = adapters[0] if adapters else ""
    return found


def not_a_sum(name: str, what: str) -> UnsupportedOperation:
    """The error for adapters that do more than add to a weight."""
    return UnsupportedOperation(
        f"the adapter of {name!r} ({what}) cannot be merged into weights for the engine. Instead: use LoRA without DoRA "
        f"or bias on linear layers and embeddings, or call merge_and_unload() on a copy."
    )


# ---------------------------------------------------------------------------------------------------------- verifying

PROBES, PROBE_LENGTH, PROBE_TOKENS = 2, 24, 8
DRIFT = 1e-3
"""Largest difference of a log-probability in fp32. Engines that hold what they were given stay below 1e-5."""
DRIFT_IN_BF16 = 0.5
"""The same in bfloat16, where engines that hold what they were given were seen to differ by up to 0.15."""


class ComparesWeights(Protocol):
    """An engine that can say which of its weights are not those that it is shown."""

    def differing_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> list[str]: ...


@frozen
class Drift:
    """How far the engine's log-probabilities of a probe are from the trainer's."""

    largest: float
    prompts: int
    tokens: int


def probe_requests(vocab_size: int) -> list[Request]:
    """Prompts that use tokens from all over the vocabulary, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (PROBES, PROBE_LENGTH), generator=generator).tolist()
    return [Request(tuple(row)) for row in ids]


def measured_drift(engine: Engine, model: Module, device: torch.device) -> Drift:
    """The engine's greedy completions of a probe, against ``model``'s log-probabilities of the same tokens."""
    config = getattr(model, "config", None)
    vocab_size: int | None = getattr(getattr(config, "get_text_config", lambda: None)(), "vocab_size", None)
    if vocab_size is None:
        raise UnsupportedOperation(
            f"weights cannot be verified with a {type(model).__name__}, which has no config with a vocab_size. "
            f"Instead: leave verify_weight_sync off."
        )
    completions = engine.generate(
        probe_requests(vocab_size), Sampling(max_new_tokens=PROBE_TOKENS, temperature=0.0, logprobs=True)
    )
    largest, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for completion in completions:
                ids = torch.tensor([[*completion.prompt_token_ids, *completion.output_token_ids]], device=device)
                logits = cast(Tensor, model(input_ids=ids).logits)[0, PROBE_LENGTH - 1 : -1].float()
                output = ids[0, PROBE_LENGTH:, None]
                expected = logits.log_softmax(-1).gather(-1, output)[:, 0]
                got = torch.tensor(completion.logprobs, device=device)
                largest = max(largest, float((got - expected).abs().max()))
                tokens += len(got)
    finally:
        model.train(was_training)
    return Drift(largest, len(completions), tokens)


def verify(
    engine: Engine,
    model: Module,
    device: torch.device,
    named_tensors: Iterable[tuple[str, Tensor]],
    limit: float = DRIFT,
) -> Drift:
    """Raises ``EngineError`` if the engine's log-probabilities of a probe are not the trainer's within ``limit``.

    ``named_tensors``: what was sent. All ranks of a sharded model have to take part: all of it is gone through.
    """
    drift = measured_drift(engine, model, device)
    drifted = not drift.largest <= limit  # NaN is one
    compare = getattr(engine, "differing_weights", None)
    found: list[str] = []
    if compare is not None:
        found = cast(ComparesWeights, engine).differing_weights(named_tensors)
    else:
        for _ in named_tensors:
            pass
    if not drifted and not found:
        return drift
    where = f" First weights that differ: {', '.join(found[:3])}." if found else ""
    raise EngineError(
        f"engine {engine.name!r} does not have the trainer's weights after an update: log-probabilities of "
        f"{drift.tokens} probe tokens differ by up to {drift.largest:.2g}, where {limit:g} is the limit.{where} "
        f"Report it with the versions that `lightrft doctor` prints."
    )
