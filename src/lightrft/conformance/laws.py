"""All laws that are checked on a backend."""

from __future__ import annotations

from lightrft.conformance import branches, checkpoints, collectives, parity, preparing, rollouts, training, world
from lightrft.conformance.law import Law

LAWS: tuple[Law, ...] = (
    *world.LAWS,
    *collectives.LAWS,
    *training.LAWS,
    *branches.LAWS,
    *parity.LAWS,
    *preparing.LAWS,
    *checkpoints.LAWS,
    *rollouts.LAWS,
)
