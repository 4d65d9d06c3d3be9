"""``get_strategy``: from a configuration to a backend, by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from attrs import fields

from lightrft.errors import not_known
from lightrft.ops.world import ranks_are_to_be_checked
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import BuildStrategy, Strategy
from lightrft.strategy.record import StrategyRecord

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "lightrft.backends"
"""Third parties register by an entry point of this group: its name is the backend's, its value ``package.module:build``."""

BUILT_IN = ("deepspeed", "fake", "fsdp", "local")


def chosen_backend(config: StrategyConfig) -> str:
    """``backend`` if given, else fsdp if ``fsdp``, else deepspeed."""
    return config.backend or ("fsdp" if config.fsdp else "deepspeed")


def registered_backends() -> dict[str, EntryPoint]:
    """The backends of installed third parties. A built-in name is never taken over."""
    from importlib.metadata import entry_points  # slow to import, and needed for third parties alone

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def backend_builder(name: str) -> BuildStrategy:
    """The ``build`` function of a backend. Its module, and so torch, is imported here and not before."""
    if name in BUILT_IN:
        return cast(BuildStrategy, import_module(f"lightrft.backends.{name}").build)
    registered = registered_backends()
    if name in registered:
        return cast(BuildStrategy, registered[name].load())
    raise not_known("backend", name, [*BUILT_IN, *registered])


def get_strategy(args: object = None) -> Strategy:
    """The strategy that ``args`` describes: a Namespace, a mapping, any object with attributes, or a StrategyConfig.

    Raises ``ConfigError`` listing every bad value, and ``UnsupportedOperation`` for a field that the chosen backend
    would not carry out (C7); both before any process is contacted. ``args`` is never changed.
    """
    config = StrategyConfig.from_args({} if args is None else args)
    strategy = backend_builder(chosen_backend(config))(config, args)
    if strategy.world_size > 1 and (config.check_ranks or ranks_are_to_be_checked()):
        from lightrft.wrappers import checked

        return checked(as_record(strategy))
    return strategy


def as_record(strategy: Strategy) -> StrategyRecord:
    """A strategy as a record, whose operations can be wrapped: a third party's need not be one."""
    if isinstance(strategy, StrategyRecord):
        return strategy
    return StrategyRecord(**{field.name: getattr(strategy, field.name) for field in fields(StrategyRecord)})
