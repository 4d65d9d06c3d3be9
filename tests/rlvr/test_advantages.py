"""Advantages by hand, and what must not change them."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightrft.errors import ConfigError
from lightrft.rlvr.advantages import (
    ADVANTAGES,
    RunningMoments,
    advantages_of,
    dr_grpo,
    group_norm,
    informative_groups,
    normalised_rewards,
    overlong_penalty,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    updated_moments,
)


@frozen
class Settings:
    advantage_estimator: str = "group_norm"
    reward_clip: float = 0.0
    reward_running_norm: bool = False
    reward_running_norm_minus_mean: bool = False
    advantages_norm: bool = False
    advantage_clip: float = 0.0


@st.composite
def batches(draw: st.DrawFn) -> Tensor:
    groups, n = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    values = draw(st.lists(st.integers(-50, 50), min_size=groups * n, max_size=groups * n))
    return torch.tensor(values, dtype=torch.float32).view(groups, n) / 10


def close(actual: Tensor, expected: object, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float32), rtol=1e-4, atol=atol)


TWO_GROUPS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.2, 0.2, 0.2, 1.0]])


def test_by_hand() -> None:
    close(dr_grpo(TWO_GROUPS), [[0.5, -0.5, -0.5, 0.5], [-0.2, -0.2, -0.2, 0.6]])
    # Standard deviations with n - 1 = 3: sqrt(1 / 3) and sqrt(0.48 / 3) = 0.4.
    s = math.sqrt(3) / 2
    close(group_norm(TWO_GROUPS), [[s, -s, -s, s], [-0.5, -0.5, -0.5, 1.5]])
    close(rloo(TWO_GROUPS), [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [-4 / 15, -4 / 15, -4 / 15, 0.8]])
    # Over the batch: mean 0.45, squares sum 3.12 - 8 * 0.2025 = 1.5, deviation sqrt(1.5 / 7).
    close(reinforce_plus_plus(TWO_GROUPS), ((TWO_GROUPS - 0.45) / math.sqrt(1.5 / 7)).tolist())
    # Less the groups' means: squares sum 1 + 0.48, mean 0.
    deviation = math.sqrt(1.48 / 7)
    close(reinforce_plus_plus_baseline(TWO_GROUPS), (dr_grpo(TWO_GROUPS) / deviation).tolist())


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.0, 0.1, 0.2, 1 / 3, 1e6])
def test_equal_rewards_give_exactly_zero(name: str, value: float) -> None:
    for n in range(2, 12):
        for dtype in (torch.float32, torch.float64):
            assert ADVANTAGES[name](torch.full((1, n), value, dtype=dtype)).abs().max() == 0.0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_float32_of_the_same_shape_and_an_untouched_input(name: str) -> None:
    rewards = torch.tensor([[1, 0, 0], [0, 1, 1]], dtype=torch.float64)
    before = rewards.clone()
    advantages = ADVANTAGES[name](rewards)
    assert advantages.dtype is torch.float32
    assert advantages.shape == rewards.shape
    assert torch.equal(rewards, before)


@given(batches(), st.floats(-5, 5), st.floats(0.1, 10))
def test_group_norm_does_not_see_shift_and_scale(rewards: Tensor, shift: float, scale: float) -> None:
    close(group_norm(rewards.double() * scale + shift), group_norm(rewards), atol=1e-3)


@given(batches(), st.floats(-5, 5), st.floats(0.1, 10))
def test_dr_grpo_does_not_see_shift_and_follows_scale(rewards: Tensor, shift: float, scale: float) -> None:
    close(dr_grpo(rewards.double() * scale + shift), dr_grpo(rewards) * scale, atol=1e-4)


@given(batches())
def test_groups_sum_to_zero_and_keep_the_order_of_rewards(rewards: Tensor) -> None:
    for estimate in (group_norm, dr_grpo, rloo):
        advantages = estimate(rewards)
        close(advantages.sum(1), torch.zeros(len(rewards)), atol=1e-4)
        better = rewards.unsqueeze(2) > rewards.unsqueeze(1)
        assert (advantages.unsqueeze(2) > advantages.unsqueeze(1))[better].all()


@given(batches())
def test_groups_do_not_see_each_other_unless_the_paper_says_so(rewards: Tensor) -> None:
    for estimate in (group_norm, dr_grpo, rloo):
        close(estimate(rewards), torch.cat([estimate(row.unsqueeze(0)) for row in rewards]))


@given(batches())
def test_reinforce_plus_plus_is_standard_over_the_batch(rewards: Tensor) -> None:
    advantages = reinforce_plus_plus(rewards)
    close(advantages.mean(), 0.0, atol=1e-4)
    if rewards.max() > rewards.min():
        close(advantages.std(), 1.0, atol=1e-3)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"reinforce_plus_plus"}))
def test_one_sample_has_no_group(name: str) -> None:
    with pytest.raises(ValueError, match=r"\(2, 1\).*n >= 2"):
        ADVANTAGES[name](torch.zeros(2, 1))


def test_reinforce_plus_plus_takes_one_sample_a_prompt() -> None:
    close(reinforce_plus_plus(torch.tensor([[1.0], [3.0]])), [[-(0.5**0.5)], [0.5**0.5]])
    close(reinforce_plus_plus(torch.tensor([[3.0]])), [[0.0]])


def test_bad_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        group_norm(torch.tensor([[1.0, math.nan]]))
    with pytest.raises(ValueError, match="shape"):
        group_norm(torch.zeros(4))


def test_informative_groups() -> None:
    assert informative_groups(torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.2, 0.2]])).tolist() == [False, True, False]


def test_overlong_penalty_by_hand() -> None:
    lengths = torch.tensor([0, 12, 13, 14, 16, 20])
    close(overlong_penalty(lengths, max_len=16, buffer_len=4, factor=2.0), [0.0, 0.0, -0.5, -1.0, -2.0, -2.0])


@pytest.mark.parametrize("buffer_len", [0, -1, 65, 1024])
def test_overlong_buffer_must_fit(buffer_len: int) -> None:
    with pytest.raises(ConfigError, match=f"overlong_buffer_len={buffer_len} .*max_new_tokens=64"):
        overlong_penalty(torch.tensor([1]), max_len=64, buffer_len=buffer_len, factor=1.0)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), max_size=6))
def test_running_moments_are_those_of_all_values_at_once(parts: list[list[float]]) -> None:
    moments = RunningMoments()
    for part in parts:
        moments = updated_moments(moments, torch.tensor(part, dtype=torch.float64))
    values = torch.tensor([value for part in parts for value in part], dtype=torch.float64)
    assert moments.count == len(values)
    if len(values):
        assert moments.mean == pytest.approx(float(values.mean()), abs=1e-9)
        assert moments.squares == pytest.approx(float((values - values.mean()).square().sum()), rel=1e-6, abs=1e-6)


def test_running_moments_by_hand() -> None:
    moments = updated_moments(RunningMoments(), torch.tensor([1.0, 3.0]))
    assert (moments.mean, moments.std) == (2.0, 1.0)
    close(normalised_rewards(torch.tensor([4.0]), evolve(moments, squares=8.0), minus_mean=True), [1.0])
    close(normalised_rewards(torch.tensor([4.0]), evolve(moments, squares=8.0), minus_mean=False), [2.0])
    assert RunningMoments().std == 1.0
    assert updated_moments(RunningMoments(), torch.full((5,), 0.2)).std == 1.0


def test_advantages_of_does_each_thing_that_the_configuration_names() -> None:
    rewards = torch.tensor([[0.0, 10.0], [0.0, 1.0]])
    plain = Settings(advantage_estimator="dr_grpo")
    close(advantages_of(rewards, plain), [[-5.0, 5.0], [-0.5, 0.5]])
    close(advantages_of(rewards, evolve(plain, reward_clip=2.0)), [[-1.0, 1.0], [-0.5, 0.5]])
    close(advantages_of(rewards, evolve(plain, advantage_clip=2.0)), [[-2.0, 2.0], [-0.5, 0.5]])
    close(advantages_of(rewards, evolve(plain, advantages_norm=True)).std(), 1.0)
    moments = RunningMoments(count=4, mean=1.0, squares=16.0)
    close(advantages_of(rewards, evolve(plain, reward_running_norm=True), moments), [[-2.5, 2.5], [-0.25, 0.25]])
    for minus_mean, expected in ((False, 4.0), (True, 3.0)):
        settings = Settings("dr_grpo", 8.0, True, minus_mean, advantages_norm=False)
        seen = normalised_rewards(torch.tensor([8.0]), moments, minus_mean=minus_mean)
        close(seen, [expected if not minus_mean else 3.5])
        close(advantages_of(rewards, settings, moments), [[-2.0, 2.0], [-0.25, 0.25]])


def test_C7_a_setting_that_cannot_be_carried_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"advantage_estimator='gae'.*group_norm"):
        advantages_of(TWO_GROUPS, Settings(advantage_estimator="gae"))
    with pytest.raises(ConfigError, match="reward_running_norm"):
        advantages_of(TWO_GROUPS, Settings(reward_running_norm=True))
