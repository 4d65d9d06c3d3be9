"""The state machine passes on every backend, and finds strategies that are broken on purpose."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from attrs import define, evolve
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.backends import fake, fsdp, local
from lightrft.conformance import program as operations
from lightrft.conformance.law import CAPABILITIES, Target
from lightrft.conformance.pool import RankFailure, RankPool, rank_pool
from lightrft.conformance.program import Program
from lightrft.conformance.run import LACKING
from lightrft.conformance.running import Differs, Serving
from lightrft.conformance.stateful import check_program, check_stateful
from lightrft.engines.protocol import Engine
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.protocol import BuildStrategy, StepOutcome
from lightrft.strategy.record import StrategyRecord

FAKE = Target(name="fake", build=fake.build, capabilities=CAPABILITIES - LACKING["fake"])
LOCAL = Target(name="local", build=local.build)


@pytest.mark.parametrize("target", [FAKE, LOCAL], ids=lambda target: target.name)
def test_every_order_of_operations(target: Target) -> None:
    check_stateful(target, None, examples=25, steps=12)


def with_engine(config: StrategyConfig, args: object = None) -> StrategyRecord:
    return fake.build(config, args, Serving())


def test_F2_the_fake_with_an_engine() -> None:
    check_stateful(evolve(LOCAL, name="fake with an engine", build=with_engine), None, examples=10, steps=12)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    with rank_pool(2, timeout=60.0) as pool:
        yield pool


@pytest.mark.backends
def test_every_order_of_operations_on_two_ranks(two_ranks: RankPool) -> None:
    check_stateful(Target(name="fsdp", build=fsdp.build, world_size=2), two_ranks, examples=10, steps=12)


# ---------------------------------------------------------------------------------------------------- broken on purpose


def changed(change: Callable[[StrategyRecord], StrategyRecord]) -> BuildStrategy:
    """``local`` with something changed."""

    def build(config: StrategyConfig, args: object = None) -> StrategyRecord:
        return change(local.build(config, args))

    return build


def steps_early(strategy: StrategyRecord) -> StrategyRecord:
    """T2: the last call but one of a window ends it."""

    def step(
        optimizer: Optimizer,
        model: Module,
        scheduler: LRScheduler | None = None,
        name: str = "model",
        *,
        flush: bool = False,
        **kwargs: object,
    ) -> StepOutcome:
        outcome = strategy.optimizer_step(optimizer, model, scheduler, name, flush=flush)
        early = outcome.micro_step == strategy.accumulated_gradient - 1 and not outcome.applied
        return strategy.optimizer_step(optimizer, model, scheduler, name, flush=True) if early else outcome

    return evolve(strategy, optimizer_step=step)


def loading(
    strategy: StrategyRecord, tag_of: Callable[[Path, str | None], str | None], moments: bool = True
) -> StrategyRecord:
    """Another tag is loaded, or no state of the optimizer."""

    def load(
        model: Module,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> tuple[str, dict[str, object]]:
        return strategy.load_ckpt(
            model,
            load_dir,
            tag_of(Path(load_dir), tag),
            load_optimizer_states=moments,
            load_module_only=load_module_only,
        )

    return evolve(strategy, load_ckpt=load)


def forgets_moments(strategy: StrategyRecord) -> StrategyRecord:
    """K1."""
    return loading(strategy, lambda _, tag: tag, moments=False)


def loads_the_oldest(strategy: StrategyRecord) -> StrategyRecord:
    """K6: whatever is asked for."""

    def first(directory: Path, tag: str | None) -> str | None:
        known = sorted(directory.glob("[a-z]*/"), key=lambda path: path.stat().st_mtime_ns)
        return known[0].name if known else tag

    return loading(strategy, first)


def keeps_too_few(strategy: StrategyRecord) -> StrategyRecord:
    """K5: the newest but one goes too."""

    def save(
        model: Module,
        save_dir: str | Path,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: int = 1000,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None:
        fewer = max_num - 1 if max_num > 1 else max_num
        strategy.save_ckpt(model, save_dir, tag, fewer, max_mem, client_state, save_latest)

    return evolve(strategy, save_ckpt=save)


@define(eq=False)
class KeepsItsCache(Serving):
    def flush_cache(self) -> None:
        """It stays."""


def serves_old_weights(strategy: StrategyRecord) -> StrategyRecord:
    """R2: what was computed with them survives an update."""

    def set_up(args: object, engine_type: str | Engine = "vllm", actor: Module | None = None) -> Engine | None:
        stale = KeepsItsCache() if isinstance(engine_type, Serving) else engine_type
        return strategy.setup_inference_engine(args, stale, actor)

    return evolve(strategy, setup_inference_engine=set_up)


def stays_asleep(strategy: StrategyRecord) -> StrategyRecord:
    """R4: nobody wakes the engine when asked to."""

    def wake() -> None:
        """Nothing."""

    return evolve(strategy, wakeup_inference_engine=wake)


def clips_nothing(config: StrategyConfig, args: object = None) -> StrategyRecord:
    """T3."""
    return local.build(evolve(config, max_norm=0.0), args)


BROKEN: dict[str, tuple[BuildStrategy, int]] = {
    "T2: steps early": (changed(steps_early), 1),
    "T3: clips nothing": (clips_nothing, 1),
    "K1: forgets moments": (changed(forgets_moments), 5),
    "K5: keeps too few": (changed(keeps_too_few), 2),
    "K6: loads the oldest": (changed(loads_the_oldest), 3),
    "R2: serves old weights": (changed(serves_old_weights), 4),
    "R4: stays asleep": (changed(stays_asleep), 2),
}
"""And how many operations it takes to show it."""


@pytest.mark.parametrize("fault", BROKEN)
def test_finds(fault: str) -> None:
    build, operations_needed = BROKEN[fault]
    target = Target(name="broken", build=build)
    with pytest.raises((AssertionError, RuntimeError)) as found:
        check_stateful(target, None, examples=25, steps=12, seed=SEED)
    smallest = program_of(found.value)
    assert len(smallest.operations) <= operations_needed
    with pytest.raises(Differs):  # what is printed is what fails
        check_program(target, None, smallest)
    check_program(LOCAL, None, smallest)


SEED = 0
"""The search always takes the same way here."""


def program_of(error: BaseException) -> Program:
    """What the note says, pasted."""
    text = error.__notes__[-1].splitlines()[-1]
    made = eval(text, dict(vars(operations)))
    assert isinstance(made, Program)
    return made


@pytest.mark.backends
def test_searching_ends_when_a_rank_dies(two_ranks: RankPool) -> None:
    """Nothing is made smaller then: each try would take as long as the time limit of the pool."""
    began = time.monotonic()
    with pytest.raises(RankFailure) as found:
        check_stateful(Target(name="dies", build=dies, world_size=2), two_ranks, examples=25, steps=12)
    assert program_of(found.value).operations
    assert time.monotonic() - began < 60.0


def dies(config: StrategyConfig, args: object = None) -> StrategyRecord:
    """At the first barrier."""
    return evolve(fsdp.build(config, args), barrier=lambda: os._exit(3))
