"""Losses by hand, against torch's own gradient of the naive formula, and by enumerating a small distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightrft.rlvr.losses import KL_ESTIMATORS, entropy, kl, policy_loss, token_logprobs

LOGITS = st.lists(st.floats(-4, 4), min_size=4, max_size=4)


def gradient(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of, retain_graph=True)[0]


def test_token_logprobs_and_gradient_equal_the_naive_formula() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.tensor([[0, 4, 2], [1, 1, 3]])
    naive = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    lean = token_logprobs(logits, ids)
    torch.testing.assert_close(lean, naive)
    weights = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(gradient((lean * weights).sum(), logits), gradient((naive * weights).sum(), logits))


def test_token_logprobs_are_float32_and_do_not_overflow() -> None:
    logits = torch.tensor([[[1000.0, 0.0], [-1000.0, -1000.0]]], dtype=torch.bfloat16)
    logprobs = token_logprobs(logits, torch.tensor([[0, 1]]))
    assert logprobs.dtype is torch.float32
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, -math.log(2)]]), rtol=0.0, atol=1e-4)


def test_token_logprobs_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(1, 3, 2\).*\(1, 2\)"):
        token_logprobs(torch.zeros(1, 3, 2), torch.zeros(1, 2, dtype=torch.long))


def test_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf]]])
    torch.testing.assert_close(entropy(logits), torch.tensor([[math.log(4), 0.0, math.log(2)]]))


# -- the clipped surrogate -------------------------------------------------------------------------------------------


def ratios(*values: float) -> Tensor:
    """Log-probabilities whose ratio to zeros is as given."""
    return torch.tensor([values]).log()


def test_policy_loss_by_hand() -> None:
    # Ratio 1.5 is clipped to 1.2 for a good token and not for a bad one; 0.5 to 0.8 the other way round.
    logprobs = ratios(1.5, 1.5, 0.5, 0.5, 1.1).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0]])
    loss = policy_loss(logprobs, torch.zeros(1, 5), advantages, torch.ones(1, 5))
    assert float(loss.loss_sum.detach()) == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8 + 2.2))
    assert float(loss.clip_fraction) == pytest.approx(2 / 5)
    assert float(loss.ratio_mean) == pytest.approx((1.5 + 1.5 + 0.5 + 0.5 + 1.1) / 5)
    assert int(loss.tokens) == 5
    # d(ratio * A) / d(logprob) = ratio * A where the clip leaves it, else nothing.
    torch.testing.assert_close(gradient(loss.loss_sum, logprobs), torch.tensor([[0.0, 1.5, -0.5, 0.0, -2.2]]))


def test_policy_loss_has_two_clip_bounds() -> None:
    logprobs = ratios(1.25, 0.75)
    advantages = torch.tensor([[1.0, -1.0]])
    loss = policy_loss(logprobs, torch.zeros(1, 2), advantages, torch.ones(1, 2), clip_low=0.1, clip_high=0.28)
    assert float(loss.loss_sum.detach()) == pytest.approx(-(1.25 - 0.9))
    assert float(loss.clip_fraction) == pytest.approx(0.5)


def test_policy_loss_is_a_policy_gradient_where_the_policy_has_not_moved() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]], requires_grad=True)
    advantages = torch.tensor([[2.0], [-1.0]])
    loss = policy_loss(logprobs, logprobs.detach(), advantages, torch.ones(2, 2))
    assert float(loss.clip_fraction) == 0.0
    torch.testing.assert_close(gradient(loss.loss_sum, logprobs), torch.tensor([[-2.0, -2.0], [1.0, 1.0]]))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_policy_loss_does_not_see_padding(garbage: float) -> None:
    mask = torch.tensor([[1, 1, 0]])
    logprobs = torch.tensor([[-1.0, -2.0, garbage]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, garbage]])
    loss = policy_loss(logprobs, torch.zeros(1, 3), advantages, mask)
    alone = policy_loss(logprobs[:, :2], torch.zeros(1, 2), advantages[:, :2], mask[:, :2])
    assert float(loss.loss_sum.detach()) == float(alone.loss_sum.detach())
    assert float(loss.ratio_mean) == float(alone.ratio_mean)
    assert gradient(loss.loss_sum, logprobs)[0, 2] == 0.0
    assert torch.isfinite(gradient(loss.loss_sum, logprobs)).all()


def test_policy_loss_gives_no_gradient_to_old_policy_and_advantages() -> None:
    inputs = [torch.full((1, 2), -1.0, requires_grad=True) for _ in range(3)]
    policy_loss(inputs[0], inputs[1], inputs[2], torch.ones(1, 2)).loss_sum.backward()  # type: ignore[no-untyped-call]  # torch's stub
    assert inputs[0].grad is not None
    assert inputs[1].grad is None
    assert inputs[2].grad is None


def test_policy_loss_of_no_token_is_zero() -> None:
    loss = policy_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2))
    assert (float(loss.loss_sum), float(loss.clip_fraction), float(loss.ratio_mean)) == (0.0, 0.0, 0.0)


def test_policy_loss_refuses_shapes_that_broadcasting_would_let_pass() -> None:
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(torch.zeros(2, 3), torch.zeros(1, 3), torch.ones(2, 3), torch.ones(2, 3))


def test_FC02_the_sum_over_a_window_over_its_tokens_is_the_token_mean() -> None:
    losses = [torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[5.0]])]
    parts = [policy_loss(torch.zeros_like(x), torch.zeros_like(x), -x, torch.ones_like(x)) for x in losses]
    assert sum(float(part.loss_sum) for part in parts) / sum(int(part.tokens) for part in parts) == 2.0


@given(st.integers(1, 5))
def test_T8_the_loss_does_not_depend_on_how_a_window_is_cut(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logprobs, old, advantages = (torch.randn(6, 4, generator=generator) for _ in range(3))
    mask = torch.rand(6, 4, generator=generator) > 0.3
    whole = policy_loss(logprobs, old, advantages, mask).loss_sum
    parts = zip(*(torch.split(x, size) for x in (logprobs, old, advantages, mask)), strict=True)
    torch.testing.assert_close(sum(policy_loss(*part).loss_sum for part in parts), whole)


# -- KL ----------------------------------------------------------------------------------------------------------------


def test_kl_by_hand() -> None:
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    d = math.log(0.5)
    assert float(kl(policy, reference, "k1")) == pytest.approx(-d)
    assert float(kl(policy, reference, "k2")) == pytest.approx(d**2 / 2)
    assert float(kl(policy, reference, "k3")) == pytest.approx(0.5 - 1 - d)


def test_kl_names_its_estimators() -> None:
    with pytest.raises(ValueError, match=r"kl_estimator='k4'.*k1, k2, k3"):
        kl(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_is_zero_where_nothing_moved_and_gives_the_reference_no_gradient(estimator: str) -> None:
    policy = torch.tensor([[-1.0, -7.0]], requires_grad=True)
    reference = policy.detach().clone().requires_grad_()
    estimate = kl(policy, reference, estimator)
    assert estimate.abs().max() == 0.0
    estimate.sum().backward()  # type: ignore[no-untyped-call]  # torch's stub
    assert reference.grad is None


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_and_k2_are_never_negative(policy: float, reference: float) -> None:
    for estimator in ("k2", "k3"):
        assert float(kl(torch.tensor([policy]), torch.tensor([reference]), estimator)) >= -1e-6


def expectations(policy: list[float], reference: list[float], estimator: str) -> tuple[Tensor, Tensor]:
    """The estimator's expectation under the policy, by enumeration, and its gradient as a loss on samples."""
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    estimate = kl(logprobs, torch.tensor(reference, dtype=torch.float64).log_softmax(-1), estimator).double()
    expected = (logprobs.detach().exp() * estimate).sum()
    return expected.detach(), gradient(expected, logits)


@given(LOGITS, LOGITS)
def test_k1_and_k3_are_unbiased(policy: list[float], reference: list[float]) -> None:
    p = torch.tensor(policy, dtype=torch.float64).log_softmax(-1)
    q = torch.tensor(reference, dtype=torch.float64).log_softmax(-1)
    true = float((p.exp() * (p - q)).sum())
    for estimator in ("k1", "k3"):
        assert float(expectations(policy, reference, estimator)[0]) == pytest.approx(true, rel=1e-4, abs=1e-4)


@given(LOGITS, LOGITS)
def test_gradients_of_the_estimators_are_as_documented(policy: list[float], reference: list[float]) -> None:
    q = torch.tensor(reference, dtype=torch.float64).log_softmax(-1)

    def true_gradient(forward: bool) -> Tensor:
        logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
        p = logits.log_softmax(-1)
        divergence = (q.exp() * (q - p)).sum() if forward else (p.exp() * (p - q)).sum()
        return gradient(divergence, logits)

    def close(estimator: str, expected: Tensor) -> None:
        torch.testing.assert_close(expectations(policy, reference, estimator)[1], expected, rtol=1e-3, atol=1e-4)

    close("k1", torch.zeros(4, dtype=torch.float64))
    close("k2", true_gradient(forward=False))
    close("k3", true_gradient(forward=True))
