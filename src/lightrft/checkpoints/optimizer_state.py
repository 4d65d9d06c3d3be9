"""The state of an optimizer by the names of the parameters: it does not depend on their order or on ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightrft.checkpoints.client_state import Json, encode, read_mapping
from lightrft.errors import CheckpointError, listed

_OTHERWISE = "pass load_optimizer_states=False"
_LIKE_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"})
"""The parts of a state that have the shape of their parameter, whichever optimizer it is that has them."""


@frozen(eq=False)
class RestoredOptimizer:
    """What fits an optimizer: for each group its hyperparameters, for each parameter that has one its state."""

    groups: list[dict[str, object]]
    state: dict[Tensor, dict[str, object]]


def encoded_optimizer(model: Module, optimizer: Optimizer) -> tuple[Json, dict[str, Tensor]]:
    """The optimizer as JSON, and its tensors by ``<parameter>/<state key>``.

    ``CheckpointError`` if it holds a parameter that ``model`` lacks.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [parameter for parameter in (*held, *optimizer.state) if id(parameter) not in names]
    if strangers:
        shapes = ", ".join(str(tuple(each.shape) if isinstance(each, Tensor) else repr(each)) for each in strangers)
        raise CheckpointError(
            f"the optimizer holds parameters that are not in the model, of shapes {shapes}. "
            "Save it with the model that it was made for."
        )
    groups = [
        {**_hyperparameters(group), "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[id(parameter)]: dict(entry) for parameter, entry in optimizer.state.items()}
    tensors: dict[str, Tensor] = {}
    tree: dict[str, Json] = {
        "class": type(optimizer).__name__,
        "param_groups": encode(groups, "param_groups", tensors, at="param_groups"),
        "state": encode(state, "optimizer.state", tensors, in_place=True),
    }
    return tree, tensors


def checked_optimizer(model: Module, optimizer: Optimizer, file: Path) -> RestoredOptimizer:
    """What ``file`` holds, if it fits ``optimizer``; ``CheckpointError`` otherwise. Changes nothing."""
    saved = read_mapping(file, _OTHERWISE)
    try:
        return _matched(model, optimizer, file, saved)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{file} is not the state of an optimizer: {error!r}") from error


def checked_moments(
    model: Module, optimizer: Optimizer, source: Path, moments: Mapping[str, Mapping[str, Tensor]]
) -> RestoredOptimizer:
    """State by the names of parameters alone, if it fits ``optimizer``, whose settings stay; else ``CheckpointError``.

    That of parameters which the optimizer does not hold is left out.
    """
    if any("exp_avg" in entry for entry in moments.values()) and "betas" not in optimizer.defaults:
        raise CheckpointError(
            f"{source} was written by a kind of Adam, the optimizer is {type(optimizer).__name__}. "
            f"Make the same one, or {_OTHERWISE}."
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in reversed(parameters.items())}
    groups = [
        {**group, "params": [names.get(id(parameter)) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    state = {name: dict(entry) for name, entry in moments.items() if id(parameters.get(name)) in held}
    saved: dict[str, object] = {"class": type(optimizer).__name__, "param_groups": groups, "state": state}
    return _matched(model, optimizer, source, saved)


def apply_optimizer(optimizer: Optimizer, restored: RestoredOptimizer) -> None:
    """Puts ``restored`` into ``optimizer``. Parameters without a saved state have none afterwards."""
    for group, hyperparameters in zip(optimizer.param_groups, restored.groups, strict=True):
        group.update(hyperparameters)
    optimizer.state.clear()
    optimizer.state.update(restored.state)


def _matched(model: Module, optimizer: Optimizer, file: Path, saved: dict[str, object]) -> RestoredOptimizer:
    groups, entries, kind = saved["param_groups"], saved["state"], type(optimizer).__name__
    if saved["class"] != kind:
        raise CheckpointError(
            f"{file} was written by {saved['class']}, the optimizer is {kind}. Make the same one, or {_OTHERWISE}."
        )
    if not isinstance(groups, list) or not isinstance(entries, dict):
        raise TypeError("param_groups must be a list and state a dict")
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{file} has {len(groups)} parameter groups, the optimizer has {len(optimizer.param_groups)}. "
            f"Make the same groups, or {_OTHERWISE}."
        )
    # A tied parameter can be found by each of its names.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in reversed(parameters.items())}
    problems: list[str] = []
    for index, (group, target) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        there = {id(parameters.get(name)): name for name in group["params"]}
        here = {id(parameter): names.get(id(parameter), "one that the model lacks") for parameter in target["params"]}
        problems += [f"group {index} of the optimizer lacks {there[key]}" for key in there.keys() - here.keys()]
        problems += [f"group {index} of the checkpoint lacks {here[key]}" for key in here.keys() - there.keys()]
    if problems:
        raise CheckpointError(
            f"{file} does not fit the optimizer:{listed(sorted(problems))}\nFor a new one, {_OTHERWISE}."
        )
    wrong = [
        f"{name}: {key} of shape {tuple(value.shape)}, the parameter has {tuple(parameters[name].shape)}"
        for name, entry in entries.items()
        for key, value in entry.items()
        if key in _LIKE_PARAMETER and isinstance(value, Tensor) and value.shape != parameters[name].shape
    ]
    if wrong:
        raise CheckpointError(f"{file} does not fit the model:{listed(wrong)}\nIt is of another one: {_OTHERWISE}.")
    return RestoredOptimizer(
        [
            {key: _moved(value, target.get(key)) for key, value in _hyperparameters(group).items()}
            for group, target in zip(groups, optimizer.param_groups, strict=True)
        ],
        {parameters[name]: _placed(entry, parameters[name], optimizer) for name, entry in entries.items()},
    )


def _hyperparameters(group: dict[str, object]) -> dict[str, object]:
    """All but the parameters, betas in plain types: configuration libraries pass lists of their own (FC19)."""
    plain = {key: value for key, value in group.items() if key != "params"}
    betas = plain.get("betas")
    if isinstance(betas, Iterable):
        plain["betas"] = tuple(beta if isinstance(beta, Tensor) else float(beta) for beta in betas)
    return plain


def _placed(entry: dict[str, object], parameter: Tensor, optimizer: Optimizer) -> dict[str, object]:
    """A parameter's state on the devices where the optimizer has it already, or else where torch would put it."""
    present = optimizer.state.get(parameter, {})
    group = next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    counts_on_device = bool(group.get("capturable") or group.get("fused"))
    usual = {"step": parameter if counts_on_device else torch.empty(0, device="cpu")}
    return {key: _moved(value, present.get(key, usual.get(key, parameter))) for key, value in entry.items()}


def _moved(value: object, like: object) -> object:
    """``value`` with its tensors on the device of ``like``, if that is a tensor."""
    if isinstance(value, Tensor) and isinstance(like, Tensor) and not like.is_meta:
        return value.to(like.device)
    if isinstance(value, list):
        return [_moved(item, like) for item in value]
    return value
