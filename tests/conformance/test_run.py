"""``check_backend``: what comes of backends that are wrong in the ways that happen. Never a traceback of the suite's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest

from conformance import broken_builds
from lightrft.backends import fake, fsdp, local
from lightrft.conformance.law import Law, Target
from lightrft.conformance.laws import LAWS
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.conformance.run import (
    BEHAVES,
    BUILDS,
    BackendReport,
    Outcome,
    Plan,
    Result,
    check_backend,
    check_target,
)
from lightrft.errors import ConfigError
from lightrft.strategy.protocol import BuildStrategy


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with rank_pool(1, timeout=20.0) as alone, rank_pool(2, timeout=20.0) as two:
        yield {1: alone, 2: two}


def named(beginning: str) -> list[Law]:
    found = [law for law in LAWS if law.name.startswith(beginning)]
    assert found
    return found


G5, T5 = "G5: broadcast", "T5: the scheduler"


def looked_at(
    pools: dict[int, RankPool],
    build: BuildStrategy,
    *,
    world_size: int = 1,
    laws: str = G5,
    xfails: Mapping[str, str] | None = None,
) -> BackendReport:
    target = Target(name="theirs", build=build, world_size=world_size, examples=5)
    return check_target(target, Plan(xfails=xfails or {}, laws=named(laws), seed=1, any_order=False), pools[world_size])


def of(report: BackendReport, law: str) -> Result:
    return next(result for result in report.results if result.law.startswith(law))


def test_a_backend_that_is_right(pools: dict[int, RankPool]) -> None:
    seen: list[Result] = []
    target = Target(name="fsdp", build=fsdp.build, world_size=2, examples=3)
    report = check_target(target, Plan(laws=named(T5), any_order=False, advance=seen.append), pools[2])
    assert [result.outcome for result in report.results] == [Outcome.PASSED] * 3
    assert seen == report.results
    assert report.is_good
    report.raise_failures()


def test_what_is_no_strategy_is_told_by_its_members(pools: dict[int, RankPool]) -> None:
    report = looked_at(pools, broken_builds.a_dict)
    assert of(report, BUILDS).outcome is Outcome.FAILED
    assert "all_reduce: AllReduce: it is missing" in of(report, BUILDS).why
    assert of(report, G5) == Result(
        law=of(report, G5).law, outcome=Outcome.SKIPPED, why="not run: build gives no Strategy"
    )
    why = of(looked_at(pools, broken_builds.mistyped), BUILDS).why
    assert re.findall(r"- (\w+)", why) == ["get_rank", "moving_average", "world_size"]
    assert "moving_average: MovingAverage: it is missing" in why
    assert "world_size: int: it is a str, '1'" in why
    assert "get_rank(): its signature is get_rank(group)" in why


def test_a_build_that_raises_on_one_rank_says_which(pools: dict[int, RankPool]) -> None:
    result = of(looked_at(pools, broken_builds.raises_on_rank_1, world_size=2), BUILDS)
    assert result.outcome is Outcome.FAILED
    assert "rank 1 raised OSError: no such device" in result.why


@pytest.mark.slow
def test_a_build_that_hangs_says_where(pools: dict[int, RankPool]) -> None:
    with rank_pool(2, timeout=3.0) as pool:
        result = of(looked_at({2: pool}, broken_builds.hangs_on_rank_1, world_size=2), BUILDS)
    assert result.outcome is Outcome.HUNG
    assert "in hangs_on_rank_1" in result.why.partition("rank 1 stood at:")[2]


def test_a_build_that_ends_its_process_is_a_failure(pools: dict[int, RankPool]) -> None:
    result = of(looked_at(pools, broken_builds.exits), BUILDS)
    assert result.outcome is Outcome.FAILED
    assert "rank 0 ended with exit code 3" in result.why


def test_S4_what_a_build_does_beside_building(pools: dict[int, RankPool]) -> None:
    report = looked_at(pools, broken_builds.behaves_badly)
    assert of(report, BUILDS).outcome is Outcome.PASSED
    why = of(report, BEHAVES).why
    assert "it changed the args that it was given" in why
    assert "it printed 'loading the backend\\n' to standard output" in why
    assert "it left processes behind" in why
    assert "it changed environment variables: BACKEND_WAS_HERE" in why
    assert of(report, G5).outcome is Outcome.PASSED, "the laws are looked at all the same"


@pytest.mark.slow
def test_a_broken_law_comes_with_a_test_that_shows_it(pools: dict[int, RankPool]) -> None:
    report = looked_at(pools, broken_builds.sums_for_a_mean, world_size=2, laws="G3")
    result = of(report, "G3")
    assert result.outcome is Outcome.FAILED
    assert result.reproduction.startswith("import torch\n")
    with pytest.raises(AssertionError, match=r"theirs W2: 1 of 3 laws:\n\nG3: reduce"):
        report.raise_failures()
    names: dict[str, object] = {}
    exec(compile(result.reproduction, "pasted", "exec"), names)
    test = next(value for name, value in names.items() if name.startswith("test_G3"))
    assert callable(test)
    with pytest.raises(AssertionError):
        test()


def test_the_values_of_a_broken_law_are_the_smallest(pools: dict[int, RankPool]) -> None:
    values = of(looked_at(pools, broken_builds.sums_for_a_mean, world_size=2, laws="G1 FC22"), "G1").reproduction
    assert len(values.partition("values=")[2]) < 120, values


@pytest.mark.slow
def test_a_law_in_which_a_rank_hangs(pools: dict[int, RankPool]) -> None:
    with rank_pool(2, timeout=3.0) as pool:
        result = of(looked_at({2: pool}, broken_builds.hangs_in_a_law, world_size=2), G5)
    assert result.outcome is Outcome.HUNG
    assert "in broadcast" in result.why


def test_xfails_expected_stale_and_unknown(pools: dict[int, RankPool]) -> None:
    expected = looked_at(pools, broken_builds.sums_for_a_mean, world_size=2, laws="G3", xfails={"G3": "sums"})
    assert of(expected, "G3").outcome is Outcome.EXPECTED
    assert of(expected, "G3").why == "sums"
    assert expected.is_good
    stale = looked_at(pools, local.build, laws=T5, xfails={T5: "long ago"})
    assert of(stale, T5).outcome is Outcome.UNEXPECTED
    assert "long ago" in of(stale, T5).why
    assert not stale.is_good
    with pytest.raises(ConfigError, match="no law begins with"):
        looked_at(pools, local.build, xfails={"T99": "?"})


def test_capabilities_and_what_cannot_be_looked_at() -> None:
    report = check_backend(fake.build, capabilities={"checkpoints"}, laws=named("T10"), any_order=False)
    assert [result.why for result in report.results[2:]] == ["without bf16"] * 3
    for told, wrong in {
        "profile='slow' is not known": {"profile": "slow"},
        r"capabilities has \['gpu'\]": {"capabilities": {"gpu"}},
    }.items():
        with pytest.raises(ConfigError, match=told):
            check_backend(fake.build, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        check_backend("no_such_module:build")
    with pytest.raises(ConfigError, match=r"Did you mean lightrft\.backends\.fake:build\?"):
        check_backend("lightrft.backends.fake:biuld")
    with pytest.raises(ConfigError, match="no lambda or closure"):
        check_backend(lambda config, args=None: fake.build(config, args))
