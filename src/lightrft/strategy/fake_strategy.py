"""The fake strategy under its own import path, with the constructor that tests of existing trainers call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from lightrft.strategy.config import StrategyConfig

if TYPE_CHECKING:
    from lightrft.engines.protocol import Engine
    from lightrft.strategy.record import StrategyRecord


def FakeStrategy(  # noqa: N802  # the name by which it is known; it makes a record, as every backend's build does
    seed: int = 42,
    max_norm: float = 1.0,
    micro_train_batch_size: int = 1,
    train_batch_size: int = 128,
    args: object = None,
    engine: Engine | None = None,
) -> StrategyRecord:
    """A strategy for tests: one process, no launcher, no GPU.

    ``args`` gives every other field of the configuration. ``engine`` gives it a rollout; without one, generating
    returns ``[]``.
    """
    from lightrft.backends.fake import build

    rest = StrategyConfig.from_args({} if args is None else args)
    config = evolve(
        rest,
        seed=seed,
        max_norm=max_norm,
        micro_train_batch_size=micro_train_batch_size,
        train_batch_size=train_batch_size,
    )
    return build(config, args, engine)


def get_fake_strategy(args: object = None, engine: Engine | None = None) -> StrategyRecord:
    """As ``get_strategy(args)``, but always the fake."""
    from lightrft.backends.fake import build

    return build(StrategyConfig.from_args({} if args is None else args), args, engine)
