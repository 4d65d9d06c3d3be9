"""All laws that are checked on a backend."""

from __future__ import annotations

from lightrft.conformance import checkpoints, collectives, training, world
from lightrft.conformance.law import Law

LAWS: tuple[Law, ...] = (*world.LAWS, *collectives.LAWS, *training.LAWS, *checkpoints.LAWS)
