"""What all tests share: the backends of this machine, quiet libraries, and Hypothesis profiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from lightrft import StrategyConfig
from lightrft.backends import fake, local
from lightrft.strategy.record import StrategyRecord
from support import MakeStrategy

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

BUILDERS: dict[str, Callable[[StrategyConfig], StrategyRecord]] = {"fake": fake.build, "local": local.build}


@pytest.fixture(params=sorted(BUILDERS))
def make_strategy(request: pytest.FixtureRequest) -> Iterator[MakeStrategy]:
    """One test body for every backend."""
    made: list[StrategyRecord] = []

    def make(**fields: object) -> StrategyRecord:
        config = StrategyConfig.from_args({"bf16": False, **fields})
        strategy = BUILDERS[request.param](config)
        made.append(strategy)
        return strategy

    yield make
    for strategy in made:
        strategy.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors are slower on two threads, and sums come out in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
