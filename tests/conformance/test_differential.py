"""Backends that run the same program see the same, at different numbers of ranks; one that is broken does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from attrs import evolve

from lightrft.backends import deepspeed, fake, fsdp, local
from lightrft.conformance import program as operations
from lightrft.conformance.differential import check_against
from lightrft.conformance.law import CAPABILITIES, Target
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.conformance.run import LACKING
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.record import StrategyRecord

LOCAL = Target(name="local", build=local.build)
ON_RANKS = (
    Target(name="fsdp", build=fsdp.build, world_size=2),
    Target(name="deepspeed-2", build=deepspeed.build, fields={"zero_stage": 2}, world_size=2),
)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    with ExitStack() as stack:
        yield {target.name: stack.enter_context(rank_pool(2, timeout=60.0)) for target in ON_RANKS}


def test_T6_the_fake_is_as_local() -> None:
    target = Target(name="fake", build=fake.build, capabilities=CAPABILITIES - LACKING["fake"])
    check_against(target, LOCAL, None, None, examples=15)


@pytest.mark.backends
@pytest.mark.parametrize("target", ON_RANKS, ids=lambda target: target.name)
def test_T6_two_ranks_are_as_one(target: Target, pools: dict[str, RankPool]) -> None:
    check_against(target, LOCAL, pools[target.name], None, examples=10)


def clips_nothing(config: StrategyConfig, args: object = None) -> StrategyRecord:
    return local.build(evolve(config, max_norm=0.0), args)


def twice_the_window(config: StrategyConfig, args: object = None) -> StrategyRecord:
    return local.build(evolve(config, train_batch_size=2 * config.train_batch_size), args)


@pytest.mark.parametrize("build", [clips_nothing, twice_the_window])
def test_finds(build: object) -> None:
    assert callable(build)
    target = evolve(LOCAL, name="broken", build=build)
    with pytest.raises(AssertionError, match="after operation 1, Train") as found:
        check_against(target, LOCAL, None, None, examples=25, seed=0)
    assert "broken:" in str(found.value)
    assert "local:" in str(found.value)
    smallest = eval(found.value.__notes__[-1].splitlines()[-1], dict(vars(operations)))
    assert len(smallest.operations) == 1
