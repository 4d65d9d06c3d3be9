"""All planted faults in backends."""

from __future__ import annotations

from mutants import checkpoint_faults, preparing_faults, rollout_faults, training_faults, world_faults
from mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *world_faults.MUTANTS,
    *training_faults.MUTANTS,
    *preparing_faults.MUTANTS,
    *checkpoint_faults.MUTANTS,
    *rollout_faults.MUTANTS,
)
