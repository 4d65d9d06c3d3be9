"""Every law on every backend: W = 1 and 2, all stages of ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from attrs import evolve

from lightrft.backends import deepspeed, fake, fsdp, local
from lightrft.conformance.law import CAPABILITIES, Law, Target, applies, check
from lightrft.conformance.laws import LAWS
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.conformance.run import LACKING

OF_FAKE = CAPABILITIES - LACKING["fake"]
"""F1: no engine unless it is given one; F2: it leaves the model's precision alone."""
IN_PROCESS = (Target(name="fake", build=fake.build, capabilities=OF_FAKE), Target(name="local", build=local.build))
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


OPTIONS: dict[str, dict[str, object]] = {
    "2-overlap": {"zero_stage": 2, "overlap_comm": True},
    "3-overlap": {"zero_stage": 3, "overlap_comm": True},
    "1-offload": {"zero_stage": 1, "adam_offload": True},
    "2-offload": {"zero_stage": 2, "adam_offload": True},
    "3-offload": {"zero_stage": 3, "adam_offload": True},
    "3-zpg": {"zero_stage": 3, "zpg": 2},
}
"""What else DeepSpeed is told: it must not change the numbers."""
OF_OPTIONS = ("T1: the", "T1: what", "T1: all", "T3", "T4", "T6: an MLP", "T7", "T7 FC21: zero_grad", "K1")
"""The laws that such an option could break."""


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
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_law(law: Law, target: Target, pools: dict[tuple[str, int], RankPool]) -> None:
    if not applies(law, target):
        pytest.skip(f"{target.name} is without {law.needs}")
    pool = None if target in IN_PROCESS else pools[target.name.split("-")[0], target.world_size]
    check(law, target, pool)


@pytest.mark.backends
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("law", [law for law in LAWS if law.name.startswith(OF_OPTIONS)], ids=lambda law: law.name)
def test_law_with_options(law: Law, option: str, pools: dict[tuple[str, int], RankPool]) -> None:
    target = Target(name=option, build=deepspeed.build, world_size=2, fields=OPTIONS[option], examples=3)
    check(law, target, pools["deepspeed", 2])
