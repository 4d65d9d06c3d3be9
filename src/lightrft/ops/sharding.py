"""Which parts of a model are sharded as one, and what becomes of its optimizer (T11)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from torch.nn import Module, ModuleList, Sequential
from torch.optim import Optimizer

from lightrft.ops.models import unwrap_model

logger = logging.getLogger(__name__)


def blocks_of(model: Module, speaks: bool = True) -> list[Module]:
    """The blocks that a model repeats: gathered, computed and let go of one after another.

    Those that the model itself names (``_no_split_modules``, as Hugging Face models do), else the members of each list
    of modules of one class, which have modules inside. A model that repeats nothing is sharded as one, with a warning
    from the rank that ``speaks``.
    """
    plain = unwrap_model(model)
    named = set(getattr(plain, "_no_split_modules", None) or ())
    blocks = [module for module in plain.modules() if type(module).__name__ in named] or list(repeated(plain))
    if not blocks and speaks:
        logger.warning(
            "%s has no repeated block: it is sharded as one unit, whose parameters are all gathered at once",
            type(plain).__name__,
        )
    return blocks


def repeated(module: Module) -> Iterator[Module]:
    """The outermost lists of at least two composite modules of one class."""
    for child in module.children():
        members = list(child.children()) if isinstance(child, ModuleList | Sequential) else []
        composite = len(members) > 1 and all(
            type(member) is type(members[0]) and any(True for _ in member.children()) for member in members
        )
        yield from members if composite else repeated(child)


def names_in_groups(optimizer: Optimizer, model: Module) -> list[list[str]]:
    """For each group of the optimizer the names of its parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def let_go(optimizer: Optimizer) -> None:
    """Empties the groups: while whole parameters are held, cutting them frees no memory."""
    for group in optimizer.param_groups:
        group["params"] = []


def repoint(optimizer: Optimizer, names: Sequence[Sequence[str]], model: Module) -> None:
    """Gives each group the parameters that now bear these names."""
    for group, held in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [model.get_parameter(name) for name in held]


def refuse_stepped(optimizer: Optimizer) -> None:
    """Refuses an optimizer that has made updates: its state belongs to whole parameters."""
    if optimizer.state:
        raise ValueError(
            "prepare: the optimizer has made updates already, and its state is that of whole parameters. Prepare the "
            "model and its optimizer before the first update, then load_ckpt."
        )
