"""Differential conformance: two backends run one generated program, and must see the same."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import seed as with_seed
from hypothesis.strategies import SearchStrategy

from lightrft.conformance.drawing import RANDOMS, move_of, setup_of
from lightrft.conformance.law import Capability, Target
from lightrft.conformance.oracle import lawful
from lightrft.conformance.pool import RankPool
from lightrft.conformance.program import Operation, Program
from lightrft.conformance.running import compare, run_on
from lightrft.conformance.searching import Check, Failed, search
from lightrft.conformance.stateful import SEARCHING, STEPS, TRIES, lanes_of


def programs(lanes: int, capabilities: frozenset[Capability], steps: int = STEPS) -> SearchStrategy[Program]:
    """Programs of at most so many operations, none of which the law leaves open where it stands."""

    def program(random: Random) -> Program:
        setup, operations = setup_of(random, lanes), list[Operation]()
        while len(operations) < steps:
            operations += move_of(random, lanes, capabilities)
        return lawful(setup, operations[:steps])

    return RANDOMS.map(program)


def check_against(
    target: Target,
    reference: Target,
    pool: RankPool | None,
    reference_pool: RankPool | None,
    *,
    examples: int,
    steps: int = STEPS,
    seed: int | None = None,
) -> None:
    """Raises ``AssertionError`` with the first observation that differs and both values, and a note that holds the smallest
    program found as an expression; or what a backend raised."""
    failed = search_against(target, reference, pool, reference_pool, examples=examples, steps=steps, seed=seed)
    if failed is not None:
        failed.raise_it(f"{target.name} is not as {reference.name}")


def search_against(
    target: Target,
    reference: Target,
    pool: RankPool | None,
    reference_pool: RankPool | None,
    *,
    examples: int,
    steps: int = STEPS,
    seed: int | None = None,
) -> Failed | None:
    """Runs up to ``examples`` programs of at most ``steps`` operations on both; a target without a pool in this process.

    The numbers of ranks may differ: what is equal is the global batch. Floats are compared within 1e-6, as in law T6,
    all else exactly.
    """
    lanes = lanes_of(target.world_size, reference.world_size)
    capabilities = target.capabilities & reference.capabilities

    def check(program: Program) -> None:
        compare_on(target, reference, pool, reference_pool, program)

    def begin(noting: Check) -> None:
        @settings(SEARCHING, max_examples=TRIES * examples)
        @given(program=programs(lanes, capabilities, steps))
        def example(program: Program) -> None:
            noting(program)

        (example if seed is None else with_seed(seed)(example))()

    return search(check, begin, examples)


def compare_on(
    target: Target, reference: Target, pool: RankPool | None, reference_pool: RankPool | None, program: Program
) -> None:
    """Runs one program on both. Raises ``Differs`` at the first thing that is not the same."""
    without: set[str] = set()
    if target.world_size != reference.world_size:
        # Which engines sleep depends on which of them had prompts, and so on how many there are.
        without.add("asleep")
    if "engine" not in target.capabilities & reference.capabilities:
        without |= {"asleep", "weight updates"}
    seen, expected = run_on(target, pool, program), run_on(reference, reference_pool, program)
    compare(program, (target.name, seen), (reference.name, expected), frozenset(without))
