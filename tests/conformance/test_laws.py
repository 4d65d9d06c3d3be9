"""Every law on every backend: W = 1 and 2, all stages of ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from attrs import evolve
from tests.conformance import branches

from lightrft.backends import deepspeed, fake, fsdp, local
from lightrft.conformance.law import Law, Target, check
from lightrft.conformance.laws import LAWS
from lightrft.conformance.pool import RankPool, rank_pool

IN_PROCESS = (Target(name="fake", build=fake.build), Target(name="local", build=local.build))
ON_RANKS = (
    Target(name="fsdp", build=fsdp.build, examples=10),
    *(
        Target(name=f"deepspeed-{stage}", build=deepspeed.build, fields={"zero_stage": stage}, examples=5)
        for stage in range(4)
    ),
)
TARGETS = (
    *(pytest.param(target, id=target.name) for target in IN_PROCESS),
    *(
        pytest.param(
            evolve(target, name=f"{target.name}-W{world_size}", world_size=world_size),
            id=f"{target.name}-W{world_size}",
            marks=pytest.mark.backends,
        )
        for world_size in (1, 2)
        for target in ON_RANKS
    ),
)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[tuple[str, int], RankPool]]:
    """One for each library beneath and number of ranks, started when it is first used."""
    with ExitStack() as stack:
        yield {
            (library, world_size): stack.enter_context(rank_pool(world_size, timeout=120.0))
            for library in ("fsdp", "deepspeed")
            for world_size in (1, 2)
        }


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("law", [*LAWS, *branches.LAWS], ids=lambda law: law.name)
def test_law(law: Law, target: Target, pools: dict[tuple[str, int], RankPool]) -> None:
    if law.bf16 and target.name == "fake":
        pytest.skip("F2: the fake leaves the model's precision alone")
    pool = None if target in IN_PROCESS else pools[target.name.split("-")[0], target.world_size]
    check(law, target, pool)
