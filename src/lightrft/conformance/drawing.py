"""Programs drawn at random: moves of one or several operations, so that what needs several together is found."""

from __future__ import annotations

from random import Random
from typing import TypeAlias

from hypothesis import strategies as st

from lightrft.conformance.law import Capability
from lightrft.conformance.program import (
    Barrier,
    Broadcast,
    Flush,
    Gather,
    Generate,
    GradNorm,
    Load,
    LoadModel,
    MovingAverage,
    Name,
    Offload,
    Operation,
    Reduce,
    Restart,
    Save,
    SaveModel,
    Setup,
    Shape,
    Sleep,
    Train,
    UpdateWeights,
    Wake,
    ZeroGrad,
)

RANDOMS = st.randoms(use_true_random=True)
"""Programs are drawn by Python's own random numbers, one seed for each: left to itself Hypothesis comes back to few values
and to few kinds of operations in one program, and most faults take several together."""
_names: tuple[Name, ...] = ("actor", "actor", "actor", "actor", "critic")
_tags = ("a", "b", "c")


def setup_of(random: Random, lanes: int) -> Setup:
    """Any."""
    shapes: tuple[Shape, ...] = ("line", "mlp", "tied", "frozen")
    return Setup(
        shape=random.choice(shapes),
        width=random.randint(2, 5),
        accumulation=random.choice((1, 1, 2, 3)),
        micro=random.randint(1, 2),
        lanes=lanes,
        max_norm=random.choice((0.0, 0.1, 0.5)),
        optimizer="sgd" if random.random() < 0.3 else "adamw",
        lr=random.choice((0.05, 0.01)),
        weight_decay=random.choice((0.0, 0.5)),
        decay=random.choice((1.0, 0.5)),
        keep=random.choice((2, 2, 1, 0)),
        sleeps=random.random() < 0.5,
    )


Move: TypeAlias = tuple[Operation, ...]
"""What is done in one go."""


def move_of(random: Random, lanes: int, capabilities: frozenset[Capability]) -> Move:
    """Any operation of a program of so many lanes, and what trainers do in one go: update and save, come back and update."""
    kinds = [update, train, average, beside]
    if "checkpoints" in capabilities:
        kinds += [update_and_save, update_and_save, come_back, come_back, save_or_load]
    if "engine" in capabilities:
        kinds += [send_and_generate, send_and_generate, roll_out]
    return random.choice(kinds)(random, lanes)


def update(random: Random, lanes: int) -> Move:
    """A window of one Train, whatever its length would be."""
    return (Train(random.choice(_names), random.randint(0, 9), flush=True),)


def train(random: Random, lanes: int) -> Move:
    """A part of a window."""
    return (Train(random.choice(_names), random.randint(0, 9), random.random() < 0.1),)


def average(random: Random, lanes: int) -> Move:
    """After an update, most often."""
    move = MovingAverage(random.choice((0.0, 0.5, 1.0)))
    return (Train("actor", random.randint(0, 9), flush=True), move) if random.random() < 0.7 else (move,)


def beside(random: Random, lanes: int) -> Move:
    """What changes no parameter."""
    kind, name = random.randrange(8), random.choice(_names)
    large = tuple(random.randint(-(2**62), 2**62) for _ in range(lanes))
    small = tuple(random.randint(-(2**40), 2**40) for _ in range(lanes))
    operations: tuple[Operation, ...] = (
        Flush(name),
        ZeroGrad(name),
        GradNorm(name),
        Offload(name),
        Reduce(small, "sum" if random.random() < 0.5 else "mean"),
        Reduce(large, "max" if random.random() < 0.5 else "min"),
        Gather(large) if random.random() < 0.5 else Broadcast(large, random.randrange(lanes)),
        Barrier(),
    )
    return (operations[kind],)


def update_and_save(random: Random, lanes: int) -> Move:
    """At the end of a window, as trainers do."""
    name, note = random.choice(_names), random.randint(0, 9)
    return Train(name, note, flush=True), Save(name, random.choice(_tags), note)


def come_back(random: Random, lanes: int) -> Move:
    """What an optimizer remembers shows in the update that follows."""
    name, tag = random.choice(_names), random.choice((None, None, *_tags))
    load = Load(name, tag), Train(name, random.randint(0, 9), flush=True)
    return (Restart(), *load) if random.random() < 0.4 else load


def save_or_load(random: Random, lanes: int) -> Move:
    """Anything with files."""
    name, tag = random.choice(_names), random.choice(_tags)
    operations: tuple[Operation, ...] = (
        Save(name, tag, random.randint(0, 9), latest=random.random() < 0.7),
        Load(name, random.choice((None, tag)), module_only=random.random() < 0.5),
        SaveModel(name),
        LoadModel(name),
        Restart(),
    )
    return (random.choice(operations),)


def generate(random: Random, lanes: int) -> Generate:
    """Up to two prompts for each lane; once in a while one of them is bad."""
    bad = random.random() < 0.1
    known: tuple[tuple[int, ...], ...] = ((1,), (2, 3), (4, 5, 6), *(((),) if bad else ()))
    prompts = tuple(tuple(random.choice(known) for _ in range(random.randint(0, 2))) for _ in range(lanes))
    return Generate(prompts, random.randint(1, 2), random.randint(0, 3), sleep=random.random() < 0.5)


def send_and_generate(random: Random, lanes: int) -> Move:
    """As trainers do."""
    return UpdateWeights(), generate(random, lanes)


def roll_out(random: Random, lanes: int) -> Move:
    """Anything with the engine."""
    return (random.choice((UpdateWeights(), Sleep(), Wake(), generate(random, lanes))),)
