"""Stateful conformance: any operations in any order, against a model of what must come out."""

from __future__ import annotations

import math
from random import Random

from hypothesis import Phase, Verbosity, settings
from hypothesis import seed as with_seed
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from lightrft.conformance.drawing import RANDOMS, move_of, setup_of
from lightrft.conformance.law import SLOW, Target
from lightrft.conformance.oracle import Oracle, lanes_per_engine
from lightrft.conformance.pool import RankPool
from lightrft.conformance.program import Operation, Program
from lightrft.conformance.running import compare, run_on
from lightrft.conformance.searching import Check, Failed, search

STEPS = 12
"""Operations of a program, at most."""
TRIES = 4
"""Programs drawn for each that is run: not all are new."""
SEARCHING = settings(
    deadline=None,
    database=None,
    suppress_health_check=SLOW,
    phases=(Phase.generate,),
    print_blob=False,
    verbosity=Verbosity.quiet,
)


def lanes_of(*world_sizes: int) -> int:
    """A number that ranks of each world can share; at least 2."""
    return math.lcm(2, *world_sizes)


def check_program(target: Target, pool: RankPool | None, program: Program) -> None:
    """Raises ``Differs`` at the first thing that ``target`` does otherwise than expected."""
    oracle = Oracle(program.setup, lanes_per_engine(target, program.setup))
    expected = [oracle.after(operation) for operation in program.operations]
    compare(program, (target.name, run_on(target, pool, program)), ("expected", expected))


def check_stateful(
    target: Target, pool: RankPool | None, *, examples: int, steps: int = STEPS, seed: int | None = None
) -> None:
    """Raises what the smallest program that fails raises, with a note that holds the program as an expression."""
    failed = search_stateful(target, pool, examples=examples, steps=steps, seed=seed)
    if failed is not None:
        failed.raise_it(f"{target.name} is not as its model")


def search_stateful(
    target: Target, pool: RankPool | None, *, examples: int, steps: int = STEPS, seed: int | None = None
) -> Failed | None:
    """Runs up to ``examples`` programs of at most ``steps`` operations, and compares with the oracle after each operation.

    Without a pool it runs in this process.
    """
    lanes = lanes_of(target.world_size)

    def begin(noting: Check) -> None:
        # Hypothesis takes state machines as classes that inherit from its own; there is no other way to write one. The rules
        # only extend the program: what they cannot do is keep state in the ranks' processes, so one run at the end has it all.
        class Machine(RuleBasedStateMachine):
            program: list[Operation]

            @initialize(random=RANDOMS)
            def begin(self, random: Random) -> None:
                self.random, self.setup = random, setup_of(random, lanes)
                self.oracle = Oracle(self.setup, lanes_per_engine(target, self.setup))
                self.program = []

            # One rule for all moves: of several, Hypothesis leaves most out of most programs, and with them what only
            # several together show.
            @rule()
            def do(self) -> None:
                for operation in move_of(self.random, lanes, target.capabilities):
                    if len(self.program) < steps and not self.oracle.left_open(operation):
                        self.oracle.after(operation)
                        self.program.append(operation)

            def teardown(self) -> None:
                if getattr(self, "program", None):
                    noting(Program(self.setup, tuple(self.program)))

        machine = Machine if seed is None else with_seed(seed)(Machine)
        limits = settings(SEARCHING, max_examples=TRIES * examples, stateful_step_count=steps)
        run_state_machine_as_test(machine, settings=limits)

    return search(lambda program: check_program(target, pool, program), begin, examples)
