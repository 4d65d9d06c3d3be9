"""Learning-rate schedules, from transformers."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.errors import missing
from lightrft.strategy.config import StrategyConfig

LEAST_RATE = 0.1
"""Where the cosine ends, as a share of the learning rate."""


def cosine_with_warmup(config: StrategyConfig, optimizer: Optimizer, max_steps: int) -> LRScheduler:
    """A linear warm-up over ``lr_warmup_ratio`` of ``max_steps`` updates, then a cosine down to a tenth of the rate
    (Loshchilov and Hutter, arXiv:1608.03983, without restarts)."""
    return schedule("cosine_with_min_lr", config, optimizer, max_steps, {"min_lr_rate": LEAST_RATE})


def constant_with_warmup(config: StrategyConfig, optimizer: Optimizer, max_steps: int) -> LRScheduler:
    """A linear warm-up over ``lr_warmup_ratio`` of ``max_steps`` updates, then the rate as it is: a run can be made
    longer later without another past."""
    return schedule("constant_with_warmup", config, optimizer, max_steps, None)


def schedule(
    name: str, config: StrategyConfig, optimizer: Optimizer, max_steps: int, specifics: dict[str, float] | None
) -> LRScheduler:
    """A schedule of transformers, by its name there."""
    try:
        from transformers import get_scheduler
    except ImportError as error:
        raise missing("transformers", "train", "a learning-rate schedule") from error
    made: LRScheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=math.ceil(max_steps * config.lr_warmup_ratio),
        num_training_steps=max_steps,
        scheduler_specific_kwargs=specifics,
    )
    return made
