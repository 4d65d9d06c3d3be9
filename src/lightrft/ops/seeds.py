"""Random states: equal where models are made, different per rank afterwards, the same in the next run (W4)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from lightrft.errors import unsupported
from lightrft.strategy.record import RunState


def seed_all(seed: int) -> None:
    """Seeds Python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def derived_seed(seed: int, *path: int) -> int:
    """A seed of its own for each ``path``, well mixed, so that neighbouring ranks share no stream."""
    return int(
        np.random.SeedSequence(entropy=abs(seed), spawn_key=path).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )


def seed_rank(state: RunState) -> None:
    """Gives this rank a stream of its own, for dropout and sampling."""
    seed_all(derived_seed(state.config.seed, 0, state.world.rank))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from ``seed`` inside; the rank's own streams go on untouched afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_all(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def init_model_context(state: RunState, meta_init: bool = False) -> Iterator[None]:
    """Makes the n-th model of a run from the n-th seed, on every rank alike.

    ``meta_init`` makes it without memory; ``prepare`` then gives each part values as it is sharded.
    """
    seed = derived_seed(state.config.seed, 1, state.models_initialised)
    state.models_initialised += 1
    with seeded(seed, state.device), torch.device("meta") if meta_init else nullcontext():
        yield


@contextmanager
def init_whole_model_context(state: RunState, meta_init: bool = False) -> Iterator[None]:
    """The same where every rank holds whole models: there is nothing to gain from making one without memory."""
    if meta_init:
        raise unsupported(
            "without sharding", "init_model_context(meta_init=True)", "make the model on its device: meta_init=False"
        )
    with init_model_context(state):
        yield
