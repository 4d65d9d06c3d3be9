"""Losses per token of a completion. They are sums and not means: ``token_mean_scale`` divides once, over the whole
window of micro-batches and all ranks (law T8), where a mean of means would not be the mean (FC02).

Shape suffixes: B completions, T tokens of a completion, V vocabulary.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def token_logprobs(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Log-probability of each token, float32 [B, T]: ``logits[ids] - logsumexp(logits)``.

    The same as ``log_softmax(logits).gather(ids)`` without a second [B, T, V] tensor kept for the backward pass.
    ``logits_BTV[:, t]`` must be the prediction of ``ids_BT[:, t]``: the caller has shifted them.
    """
    if logits_BTV.shape[:-1] != ids_BT.shape:
        raise ValueError(
            f"logits {tuple(logits_BTV.shape)} do not fit ids {tuple(ids_BT.shape)}: one row for each token."
        )
    logits = logits_BTV.float()
    return logits.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def entropy(logits_BTV: Tensor) -> Tensor:
    """Entropy of each next-token distribution in nats, float32 [B, T]: ``logsumexp(logits) - sum(p * logits)``."""
    logits = logits_BTV.float()
    # A token of logit -inf has probability 0 and adds nothing, where 0 * -inf would be NaN.
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits.clamp(min=torch.finfo(torch.float32).min)).sum(-1)


@frozen
class PolicyLoss:
    """A policy loss summed over tokens, and what to watch. All are scalar tensors; only ``loss_sum`` has a gradient."""

    loss_sum: Tensor
    clip_fraction: Tensor
    """Share of the tokens whose gradient the clip took away."""
    ratio_mean: Tensor
    """Mean over tokens of new / old probability: 1 when the policy is the one that sampled."""
    tokens: Tensor
    """Tokens that count."""


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """The clipped surrogate: sum over tokens of ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``.

    Schulman et al., PPO, arXiv:1707.06347, equation 7; two clip bounds as in DAPO, arXiv:2503.14476, section 3.1.
    ``advantages_BT`` is [B, T] or anything that broadcasts to it, such as [B, 1]; ``mask_BT`` is true where a token
    counts, and what stands elsewhere, NaN included, changes nothing. Only ``logprobs_BT`` gets a gradient.
    """
    shape = logprobs_BT.shape
    if old_logprobs_BT.shape != shape or mask_BT.shape != shape:
        raise ValueError(
            f"logprobs {tuple(shape)}, old_logprobs {tuple(old_logprobs_BT.shape)} and mask {tuple(mask_BT.shape)} "
            "must have one shape."
        )
    mask = mask_BT.bool()
    advantages = advantages_BT.detach().float().expand(shape)
    # Masked before exp: an infinite ratio at padding would give a NaN gradient even when multiplied by 0 afterwards.
    log_ratio = (logprobs_BT.float() - old_logprobs_BT.detach().float()).masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    with torch.no_grad():
        clipped = ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))
        tokens = mask.sum()
        count = tokens.clamp(min=1)
        clip_fraction = (clipped & mask).sum() / count
        ratio_mean = (ratio * mask).sum() / count
    return PolicyLoss(-surrogate.masked_fill(~mask, 0.0).sum(), clip_fraction, ratio_mean, tokens)


def kl(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, estimator: str = "k3") -> Tensor:
    """An estimate of KL(policy || reference) at each token that the policy drew, float32 [B, T].

    With ``d = log reference - log policy`` (Schulman, "Approximating KL Divergence", 2020):
      - ``k1 = -d``: unbiased, of high variance, may be negative;
      - ``k2 = d**2 / 2``: biased, of low variance, never negative;
      - ``k3 = exp(d) - 1 - d``: unbiased, of low variance, never negative.

    Being unbiased as a value says nothing about the gradient, when the estimate is used as a loss on samples of the
    policy (Tang and Munos, arXiv:2506.09477): in expectation k1's gradient is 0 and so does nothing, k2's is that of
    KL(policy || reference), and k3's that of KL(reference || policy), which agrees with it only near the reference.
    Only ``logprobs_BT`` gets a gradient. Raises ``ValueError`` for another name.
    """
    d = reference_logprobs_BT.detach().float() - logprobs_BT.float()
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return torch.expm1(d) - d
    raise ValueError(f"kl_estimator={estimator!r} is unknown. Use one of {', '.join(KL_ESTIMATORS)}.")
