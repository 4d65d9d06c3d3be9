"""lightrft: one typed interface between a reinforcement-fine-tuning trainer and what runs it.

Importing it loads neither torch nor an engine: each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.engines.protocol import Completion, Engine, Request, Sampling
    from lightrft.ops.collectives import token_mean_scale, weighted_mean
    from lightrft.strategy.config import StrategyConfig
    from lightrft.strategy.fake_strategy import FakeStrategy, get_fake_strategy
    from lightrft.strategy.protocol import StepOutcome, Strategy
    from lightrft.strategy.record import StrategyRecord, bind, compose
    from lightrft.strategy.strategy import get_strategy

__version__ = "0.1.0"

_HOMES = {
    "Completion": "lightrft.engines.protocol",
    "Engine": "lightrft.engines.protocol",
    "FakeStrategy": "lightrft.strategy.fake_strategy",
    "Request": "lightrft.engines.protocol",
    "Sampling": "lightrft.engines.protocol",
    "StepOutcome": "lightrft.strategy.protocol",
    "Strategy": "lightrft.strategy.protocol",
    "StrategyConfig": "lightrft.strategy.config",
    "StrategyRecord": "lightrft.strategy.record",
    "bind": "lightrft.strategy.record",
    "compose": "lightrft.strategy.record",
    "get_fake_strategy": "lightrft.strategy.fake_strategy",
    "get_strategy": "lightrft.strategy.strategy",
    "token_mean_scale": "lightrft.ops.collectives",
    "weighted_mean": "lightrft.ops.collectives",
}

__all__ = [
    "Completion",
    "Engine",
    "FakeStrategy",
    "Request",
    "Sampling",
    "StepOutcome",
    "Strategy",
    "StrategyConfig",
    "StrategyRecord",
    "bind",
    "compose",
    "get_fake_strategy",
    "get_strategy",
    "token_mean_scale",
    "weighted_mean",
]


if not TYPE_CHECKING:  # a type checker would take any name that is imported from here for one that there is

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'lightrft' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
