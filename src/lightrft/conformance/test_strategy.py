"""What ``pytest --pyargs lightrft.conformance --strategy mypackage:build`` runs; the options are in ``plugin``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, cast

import pytest

from lightrft.conformance.building import examine_build
from lightrft.conformance.command import ConformanceOptions, targets_of
from lightrft.conformance.law import Capability, Law, Target, applies, check
from lightrft.conformance.laws import LAWS
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.conformance.run import (
    ANY_ORDER,
    BEHAVES,
    BESIDE_THE_LAWS,
    BUILDS,
    PROFILES,
    of_ranks,
    read_xfails,
    refuse_unknown_xfails,
)
from lightrft.conformance.stateful import check_stateful
from lightrft.errors import USER_ERRORS, ConfigError, listed


def options_of(config: pytest.Config) -> ConformanceOptions:
    """What was asked for, as ``lightrft conformance`` has it."""
    names = cast("list[str] | None", config.getoption("--strategy"))
    if not names:
        raise ConfigError("name what is to be checked: --strategy mypackage.module:build")
    return ConformanceOptions(
        backends=tuple(names),
        world=tuple(cast("list[int]", config.getoption("--world"))),
        profile=cast('Literal["quick", "ci", "nightly"]', config.getoption("--laws-profile")),
        without=tuple(cast("list[Capability]", config.getoption("--lacking"))),
        xfails=cast("Path | None", config.getoption("--xfails")),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each law, strategy and number of ranks."""
    try:
        options = options_of(metafunc.config)
        targets = [target for name in options.backends for target in targets_of(name, options)]
        xfails = {} if options.xfails is None else read_xfails(options.xfails)
        refuse_unknown_xfails(xfails, [*BESIDE_THE_LAWS, *(law.name for law in LAWS)])
    except USER_ERRORS as error:
        raise pytest.UsageError(str(error)) from error
    metafunc.parametrize("target", targets, ids=[f"{one.name}-W{one.world_size}" for one in targets], scope="session")
    if "law" in metafunc.fixturenames:
        laws = [pytest.param(law, id=law.name, marks=marks(law.name, xfails)) for law in LAWS]
        metafunc.parametrize("law", laws)
    elif "any_order" in metafunc.fixturenames:
        metafunc.parametrize("any_order", [pytest.param(True, id=ANY_ORDER, marks=marks(ANY_ORDER, xfails))])
    else:
        names = [pytest.param(name, id=name, marks=marks(name, xfails)) for name in (BUILDS, BEHAVES)]
        metafunc.parametrize("name", names)


def marks(name: str, xfails: Mapping[str, str]) -> list[pytest.MarkDecorator]:
    """A strict xfail: an entry that is no longer true fails."""
    return [
        pytest.mark.xfail(reason=reason, strict=True) for prefix, reason in xfails.items() if name.startswith(prefix)
    ]


@pytest.fixture(scope="session")
def pools(request: pytest.FixtureRequest) -> Iterator[dict[int, RankPool]]:
    """Ranks, which live as long as the session."""
    options = options_of(request.config)
    timeout = PROFILES[options.profile].timeout
    with ExitStack() as stack:
        yield {world: stack.enter_context(rank_pool(world, timeout=timeout)) for world in {1, *options.world}}


def test_building(name: str, target: Target, pools: dict[int, RankPool]) -> None:
    """That there is a strategy, and that to build it does nothing else."""
    built = pools[target.world_size].run(examine_build, target.build, target.fields)
    wrong = of_ranks([each.misfits if name == BUILDS else each.misconduct for each in built])
    assert not wrong, f"{name}:{listed(wrong)}"


def test_law(law: Law, target: Target, pools: dict[int, RankPool]) -> None:
    """Every law."""
    if not applies(law, target):
        pytest.skip(f"{target.name} is without {law.needs}")
    check(law, target, pools[target.world_size])


def test_any_order(any_order: bool, target: Target, pools: dict[int, RankPool]) -> None:
    """Programs of operations, against a model of what must come out."""
    check_stateful(target, pools[target.world_size], examples=target.examples)
