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
    try:
        from transformers import get_scheduler
    except ImportError as error:
        raise missing("transformers", "train", "a learning-rate schedule") from error
    return get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=math.ceil(max_steps * config.lr_warmup_ratio),
        num_training_steps=max_steps,
        scheduler_specific_kwargs={"min_lr_rate": LEAST_RATE},
    )
