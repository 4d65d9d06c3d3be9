"""From rewards to advantages: how much better a completion was than could be expected.

Shape suffixes: G prompts ("groups"), n completions of each. Everything is computed in float64 and returned in float32.
A group of equal rewards gives exactly 0, and not a rounding error over a tiny standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from lightrft.errors import ConfigError

EPS = 1e-6
"""Added to a standard deviation before dividing by it."""


def check_groups(rewards_Gn: Tensor, least: int) -> Tensor:
    """The rewards in float64. Raises ``ValueError`` where they are no [G, n] with n >= ``least``, or not finite."""
    if rewards_Gn.ndim != 2 or rewards_Gn.shape[1] < least:
        raise ValueError(f"rewards have shape {tuple(rewards_Gn.shape)}; expected [groups, n] with n >= {least}.")
    if not torch.isfinite(rewards_Gn).all():
        raise ValueError("rewards hold NaN or infinity. lightrft.rlvr.rewards.score names the completion.")
    return rewards_Gn.double()


def group_centred(rewards_Gn: Tensor) -> Tensor:
    """Rewards less their group's mean, float64; exactly 0 where all of a group are equal."""
    centred = rewards_Gn - rewards_Gn.mean(1, keepdim=True)
    return centred * informative_groups(rewards_Gn).unsqueeze(1)


def standardised(values: Tensor) -> Tensor:
    """All values less their mean, over their standard deviation (n - 1 in its denominator) + eps; 0 if all agree."""
    if values.max() == values.min():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + EPS)


def group_norm(rewards_Gn: Tensor) -> Tensor:
    """GRPO: (r - mean) / (std + eps) within each group (Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    The paper leaves open which standard deviation; this is the sample's, with n - 1 in the denominator, as
    ``torch.std`` has it. [G, n] -> float32 [G, n]. Raises ``ValueError`` for n < 2.
    """
    rewards = check_groups(rewards_Gn, 2)
    return (group_centred(rewards) / (rewards.std(1, keepdim=True) + EPS)).float()


def dr_grpo(rewards_Gn: Tensor) -> Tensor:
    """Dr. GRPO: r - mean within each group, not divided: division favours questions on which nearly all samples agree
    (Liu et al., arXiv:2503.20783, section 3.1). [G, n] -> float32 [G, n]. Raises ``ValueError`` for n < 2."""
    return group_centred(check_groups(rewards_Gn, 2)).float()


def rloo(rewards_Gn: Tensor) -> Tensor:
    """Leave one out: r less the mean of the group's others, which is n / (n - 1) times :func:`dr_grpo`
    (Ahmadian et al., arXiv:2402.14740, section 2.2). [G, n] -> float32 [G, n]. Raises ``ValueError`` for n < 2."""
    rewards = check_groups(rewards_Gn, 2)
    n = rewards.shape[1]
    return (group_centred(rewards) * (n / (n - 1))).float()


def reinforce_plus_plus(rewards_Gn: Tensor) -> Tensor:
    """REINFORCE++: (r - mean) / (std + eps) over the whole batch (Hu et al., arXiv:2501.03262).

    The form for a reward of the outcome, without the paper's per-token KL reward; add a KL loss instead. "Batch" is
    what is passed: give it the rewards of all ranks. n may be 1. [G, n] -> float32 [G, n].
    """
    return standardised(check_groups(rewards_Gn, 1)).float()


def reinforce_plus_plus_baseline(rewards_Gn: Tensor) -> Tensor:
    """REINFORCE++ with baseline: less the group's mean first, then normalised over the whole batch (same paper).
    [G, n] -> float32 [G, n]. Raises ``ValueError`` for n < 2."""
    return standardised(group_centred(check_groups(rewards_Gn, 2))).float()


ADVANTAGES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "group_norm": group_norm,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "reinforce_plus_plus": reinforce_plus_plus,
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    }
)
"""``advantage_estimator`` -> its function."""


def clip_to(values: Tensor, bound: float) -> Tensor:
    """Values within [-bound, bound]; 0 means unbounded, as in ``reward_clip`` and ``advantage_clip``."""
    return values.clamp(-bound, bound) if bound > 0 else values


def informative_groups(rewards_Gn: Tensor) -> Tensor:
    """bool [G]: groups whose rewards differ. The others have no gradient under a group baseline and are what dynamic
    sampling drops (Yu et al., DAPO, arXiv:2503.14476, section 3.2)."""
    return rewards_Gn.amax(1) != rewards_Gn.amin(1)


def check_overlong_buffer(buffer_len: int, max_len: int) -> None:
    """Raises ``ConfigError`` where the buffer is longer than the completion."""
    if not 1 <= buffer_len <= max_len:
        raise ConfigError(
            f"overlong_buffer_len={buffer_len} is not from 1 to max_new_tokens={max_len}: it is the last part of a "
            f"completion. Use {max(1, max_len // 4)}, or more new tokens."
        )


def overlong_penalty(lengths: Tensor, *, max_len: int, buffer_len: int, factor: float) -> Tensor:
    """Soft punishment of long completions, to be added to the rewards (DAPO, arXiv:2503.14476, equation 13).

    0 up to ``max_len - buffer_len`` tokens, falling in a line to ``-factor`` at ``max_len``, and no further.
    ``lengths`` in tokens, any shape -> float32 of that shape. Raises ``ConfigError`` where the buffer is longer than
    the completion.
    """
    check_overlong_buffer(buffer_len, max_len)
    excess = (lengths.float() - (max_len - buffer_len)) / buffer_len
    return -factor * excess.clamp(0.0, 1.0)


@frozen
class RunningMoments:
    """Count, mean and sum of squared deviations of all rewards so far: three numbers, to be saved with a checkpoint."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """The population's standard deviation; 1.0 as long as there is none to speak of."""
        deviation = math.sqrt(self.squares / self.count) if self.count else 0.0
        return deviation if deviation > EPS else 1.0


def updated_moments(moments: RunningMoments, values: Tensor) -> RunningMoments:
    """The moments with ``values`` taken in (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979, equation 2.1), as if all had been seen at once."""
    if not values.numel():
        return moments
    batch = values.double()
    n, mean = batch.numel(), float(batch.mean())
    total, delta = moments.count + n, mean - moments.mean
    return RunningMoments(
        count=total,
        mean=moments.mean + delta * n / total,
        squares=moments.squares + float((batch - mean).square().sum()) + delta**2 * moments.count * n / total,
    )


def normalised_rewards(rewards: Tensor, moments: RunningMoments, *, minus_mean: bool) -> Tensor:
    """Rewards over the running standard deviation, less the running mean first if ``minus_mean``."""
    return (rewards - moments.mean if minus_mean else rewards) / moments.std


class AdvantageSettings(Protocol):
    """What :func:`advantages_of` reads of a ``StrategyConfig``."""

    @property
    def advantage_estimator(self) -> str: ...
    @property
    def reward_clip(self) -> float: ...
    @property
    def reward_running_norm(self) -> bool: ...
    @property
    def reward_running_norm_minus_mean(self) -> bool: ...
    @property
    def advantages_norm(self) -> bool: ...
    @property
    def advantage_clip(self) -> float: ...


def estimator_named(name: str) -> Callable[[Tensor], Tensor]:
    """The function of ``ADVANTAGES``. Raises ``ConfigError`` that lists them."""
    if name not in ADVANTAGES:
        raise ConfigError(f"advantage_estimator={name!r} is unknown. Use one of {', '.join(ADVANTAGES)}.")
    return ADVANTAGES[name]


def advantages_of(rewards_Gn: Tensor, config: AdvantageSettings, moments: RunningMoments | None = None) -> Tensor:
    """Advantages as the configuration asks for them, float32 [G, n].

    In this order: clip rewards, divide by the running deviation, estimate, normalise over the batch
    (``advantages_norm``), clip. Rewards are clipped before anything is measured on them, so that no outlier spoils what
    is divided by.
    ``moments`` must have taken in these (clipped) rewards already. Raises ``ConfigError``.
    """
    estimate = estimator_named(config.advantage_estimator)
    rewards = clip_to(rewards_Gn, config.reward_clip)
    if config.reward_running_norm:
        if moments is None:
            raise ConfigError(
                "reward_running_norm needs the running moments, and the trainer keeps none. Leave it off."
            )
        rewards = normalised_rewards(rewards, moments, minus_mean=config.reward_running_norm_minus_mean)
    advantages = estimate(rewards)
    if config.advantages_norm:
        advantages = standardised(advantages.double()).float()
    return clip_to(advantages, config.advantage_clip)
