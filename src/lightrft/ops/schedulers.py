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
    return _schedule(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=warmup_steps(config, max_steps),
        num_training_steps=max_steps,
        scheduler_specific_kwargs={"min_lr_rate": LEAST_RATE},
    )


def constant_with_warmup(config: StrategyConfig, optimizer: Optimizer, max_steps: int) -> LRScheduler:
    """A linear warm-up over ``lr_warmup_ratio`` of ``max_steps`` updates, then the rate as it is: a run can be made
    longer later without another past."""
    return _schedule("constant_with_warmup", optimizer, num_warmup_steps=warmup_steps(config, max_steps))


def warmup_steps(config: StrategyConfig, max_steps: int) -> int:
    """Updates until the full learning rate."""
    return math.ceil(max_steps * config.lr_warmup_ratio)


def _schedule(name: str, optimizer: Optimizer, **options: object) -> LRScheduler:
    try:
        from transformers import get_scheduler
    except ImportError as error:
        raise missing("transformers", "train", "a learning-rate schedule") from error
    schedule: LRScheduler = get_scheduler(name, optimizer, **options)
    return schedule
