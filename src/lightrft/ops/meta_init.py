"""Values for a model that was made without memory: part by part, as it is sharded, so that no rank ever holds it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.nn import Module

from lightrft.errors import ConfigError
from lightrft.ops.models import unwrap_model
from lightrft.ops.seeds import derived_seed, seeded
from lightrft.strategy.record import RunState


def is_meta(model: Module) -> bool:
    """Whether any of its tensors has no memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def filling(state: RunState, model: Module) -> Iterator[Callable[[Module], None]]:
    """A function that fills the parts of ``model``, called on one after another, the model itself last.

    The values come from the seed and the order of the parts: the same on every rank, not those that the model would
    have had without ``meta_init``.
    """
    if not is_meta(model):
        yield lambda part: None
        return
    plain = unwrap_model(model)
    shared = tied_names(plain)
    seed = derived_seed(state.config.seed, 5, state.models_filled)
    state.models_filled += 1

    def fill(part: Module) -> None:
        for module in part.modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if any(tensor.is_meta for tensor in own):
                module.to_empty(device=state.device, recurse=False)
                initialise(module, plain)
        if part is model:
            tie(plain, shared)

    with seeded(seed, state.device):
        yield fill


def initialise(module: Module, model: Module) -> None:
    """Values for a module's own parameters and buffers: as Hugging Face's models do it, or as torch's modules do."""
    for owner, name, arguments in ((model, "_init_weights", (module,)), (module, "reset_parameters", ())):
        method = getattr(owner, name, None)
        if callable(method):
            method(*arguments)
            return
    raise ConfigError(
        f"meta_init: {type(module).__name__} has parameters or buffers of its own and no reset_parameters(). Give it "
        f"one, or make the model with meta_init=False."
    )


def tied_names(model: Module) -> list[tuple[str, str]]:
    """The further names of parameters that have several, each with the first."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return [(name, known) for name, parameter in every if (known := first.setdefault(id(parameter), name)) != name]


def tie(model: Module, names: list[tuple[str, str]]) -> None:
    """Makes them one again: memory was given to each."""
    for name, known in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(known))
