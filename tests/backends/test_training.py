"""The laws of training (T), on every backend of one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightrft import token_mean_scale
from lightrft.strategy.record import StrategyRecord
from support import MakeStrategy


class Line(nn.Module):
    """y = w * x."""

    def __init__(self, w: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator), torch.randn(samples, 2, generator=generator)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


@given(accumulation=st.integers(1, 5), micro=st.integers(1, 3), seed=st.integers(0, 100))
def test_T1_gradient_is_that_of_the_mean_over_the_batch(
    make_strategy: MakeStrategy, accumulation: int, micro: int, seed: int
) -> None:
    strategy = make_strategy(train_batch_size=accumulation * micro, micro_train_batch_size=micro)
    model, reference = mlp(), mlp()
    model, optimizer = strategy.prepare((model, sgd(model)))
    x, y = batch(accumulation * micro, seed)
    for index in range(accumulation):
        rows = slice(index * micro, (index + 1) * micro)
        strategy.backward(mse_loss(model(x[rows]), y[rows]), model, optimizer)
    torch.autograd.backward(mse_loss(reference(x), y))
    for mine, theirs in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_FC01_accumulation_length_does_not_change_the_gradient(make_strategy: MakeStrategy, micro: int) -> None:
    strategy = make_strategy(train_batch_size=4, micro_train_batch_size=micro)
    model = Line()
    model, optimizer = strategy.prepare((model, sgd(model)))
    for x in torch.split(torch.tensor([1.0, 2.0, 3.0, 4.0]), micro):
        strategy.backward(model(x).square().mean(), model, optimizer)
    assert model.w.grad is not None
    assert model.w.grad.item() == pytest.approx(15.0, abs=1e-6)


def test_FC03_the_callers_loss_is_left_alone(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=4)
    model = Line()
    model, optimizer = strategy.prepare((model, sgd(model)))
    loss = model(torch.tensor([3.0])).mean()
    before = loss.item()
    strategy.backward(loss, model, optimizer)
    assert loss.item() == before == 3.0
    assert loss.requires_grad


@given(accumulation=st.integers(1, 4), calls=st.integers(1, 9))
def test_T2_applies_on_each_Ath_call_and_changes_nothing_between(
    make_strategy: MakeStrategy, accumulation: int, calls: int
) -> None:
    strategy = make_strategy(train_batch_size=accumulation)
    model = mlp()
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    x, y = batch(calls)
    for call in range(1, calls + 1):
        before, state = parameters(model), copy.deepcopy(optimizer.state_dict())
        epoch = scheduler.last_epoch
        strategy.backward(mse_loss(model(x[call - 1 : call]), y[call - 1 : call]), model, optimizer)
        outcome = strategy.optimizer_step(optimizer, model, scheduler)
        due = call % accumulation == 0
        assert outcome.applied is due
        assert outcome.micro_step == (call - 1) % accumulation + 1
        assert (outcome.grad_norm is not None) is due
        assert same(before, parameters(model)) is not due
        assert scheduler.last_epoch == epoch + due
        if not due:
            assert str(state) == str(optimizer.state_dict())


def test_T2_two_models_under_one_name_count_clip_and_step_alone(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=2)
    actor, critic = Line(1.0), Line(1.0)
    (actor, actor_optim), (critic, critic_optim) = strategy.prepare((actor, sgd(actor)), (critic, sgd(critic)))
    one = torch.tensor([1.0])
    strategy.backward(actor(one).mean(), actor, actor_optim)
    assert not strategy.optimizer_step(actor_optim, actor).applied
    strategy.backward(critic(one).mean(), critic, critic_optim)
    assert not strategy.optimizer_step(critic_optim, critic).applied
    strategy.backward(actor(one).mean(), actor, actor_optim)
    assert strategy.optimizer_step(actor_optim, actor).applied
    assert critic.w.item() == 1.0
    assert critic.w.grad is not None
    assert actor.w.item() == pytest.approx(0.0, abs=1e-5)
    strategy.backward(critic(one).mean(), critic, critic_optim)
    assert strategy.optimizer_step(critic_optim, critic).applied  # its own second call, whatever the actor did between
    assert critic.w.item() == pytest.approx(0.0, abs=1e-5)


@given(max_norm=st.sampled_from([0.0, 0.01, 0.5, 1.0, 100.0]), scale=st.sampled_from([0.01, 1.0, 50.0]))
def test_T3_clips_as_torch_does_by_the_norm_before(make_strategy: MakeStrategy, max_norm: float, scale: float) -> None:
    strategy = make_strategy(train_batch_size=3, micro_train_batch_size=3, max_norm=max_norm)
    model, reference = mlp(), mlp()
    model, optimizer = strategy.prepare((model, sgd(model)))
    x, y = batch(3)
    strategy.backward(mse_loss(model(x), y) * scale, model, optimizer)
    outcome = strategy.optimizer_step(optimizer, model)
    torch.autograd.backward(mse_loss(reference(x), y) * scale)
    norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm or float("inf"))
    sgd(reference).step()
    assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for mine, theirs in zip(parameters(model), parameters(reference), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-7, rtol=1e-6)


def test_FC04_the_norm_is_of_the_whole_model_not_of_a_group(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1, max_norm=1.0)
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    model = nn.ParameterList([first, second])
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    strategy.backward((3 * first + 4 * second).sum(), model, optimizer)
    outcome = strategy.optimizer_step(optimizer, model)
    assert outcome.grad_norm == pytest.approx(5.0)
    assert first.item() == pytest.approx(-0.6, abs=1e-5)
    assert second.item() == pytest.approx(-0.8, abs=1e-5)


@pytest.mark.parametrize("made_last", ["actor", "critic"])
def test_FC05_the_model_that_steps_is_the_one_that_is_clipped(make_strategy: MakeStrategy, made_last: str) -> None:
    strategy = make_strategy(train_batch_size=1, max_norm=1.0)
    actor, critic = Line(0.0), Line(0.0)
    makers = {"actor": lambda: sgd(actor), "critic": lambda: sgd(critic)}
    order = sorted(makers, key=lambda name: name == made_last)
    optimizers = {name: makers[name]() for name in order}
    ten = torch.tensor([10.0])
    strategy.backward(critic(ten).mean(), critic, optimizers["critic"])
    strategy.backward(actor(ten).mean(), actor, optimizers["actor"])
    outcome = strategy.optimizer_step(optimizers["actor"], actor)
    assert outcome.grad_norm == pytest.approx(10.0)
    assert actor.w.item() == pytest.approx(-1.0, abs=1e-5)
    assert critic.w.item() == 0.0
    assert critic.w.grad is not None
    assert critic.w.grad.item() == 10.0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_T4_FC06_a_norm_that_is_not_finite_skips_the_update(make_strategy: MakeStrategy, bad: float) -> None:
    strategy = make_strategy(train_batch_size=2)
    model = mlp()
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    x, y = batch(2)

    def window(factor: float) -> list[bool]:
        outcomes = []
        for index in range(2):
            rows = slice(index, index + 1)
            scale = factor if index == 0 else 1.0
            strategy.backward(mse_loss(model(x[rows]), y[rows]) * scale, model, optimizer)
            outcomes.append(strategy.optimizer_step(optimizer, model, scheduler))
        assert outcomes[-1].skipped_nonfinite is not outcomes[-1].applied
        return [outcome.applied for outcome in outcomes]

    assert window(1.0) == [False, True]
    before, state, epoch = parameters(model), copy.deepcopy(optimizer.state_dict()), scheduler.last_epoch
    assert window(bad) == [False, False]
    assert same(before, parameters(model))
    assert str(state) == str(optimizer.state_dict())
    assert scheduler.last_epoch == epoch
    assert gradients(model) == []
    assert window(1.0) == [False, True]
    assert all(torch.isfinite(parameter).all() for parameter in parameters(model))


def test_T5_the_scheduler_advances_once_for_each_applied_update(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=3)
    model = mlp()
    optimizer = strategy.create_optimizer(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    x, y = batch(1)
    rates = []
    for _ in range(7):
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("extra_call", [False, True])
@given(have=st.integers(1, 4))
def test_T7_FC21_a_window_cut_short_is_the_mean_of_what_it_has(
    make_strategy: MakeStrategy, have: int, extra_call: bool
) -> None:
    strategy = make_strategy(train_batch_size=4, max_norm=0.0)
    model = Line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    applied = False
    for index in range(have):
        strategy.backward(model(torch.tensor([float(index + 1)])).mean(), model, optimizer)
        flush = index == have - 1 and not extra_call
        applied = strategy.optimizer_step(optimizer, model, flush=flush).applied
    if extra_call and not applied:
        applied = strategy.optimizer_step(optimizer, model, flush=True).applied
    assert applied
    assert model.w.item() == pytest.approx(-sum(range(1, have + 1)) / have)
    assert not strategy.optimizer_step(optimizer, model, flush=True).applied  # there is nothing left


def test_FC21_six_micro_batches_of_four(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=4, max_norm=0.0)
    model = Line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    seen = [0.0]
    for index in range(6):
        strategy.backward(model(torch.tensor([float(index + 1)])).mean(), model, optimizer)
        if strategy.optimizer_step(optimizer, model, flush=index == 5).applied:
            seen.append(model.w.item())
    assert [a - b for a, b in pairwise(seen)] == pytest.approx([2.5, 5.5])


def test_FC21_without_flush_zero_grad_begins_the_next_epoch_clean(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=4, max_norm=0.0)
    model = Line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))

    def epoch(values: Sequence[float]) -> list[bool]:
        applied = []
        for value in values:
            strategy.backward(model(torch.tensor([value])).mean(), model, optimizer)
            applied.append(strategy.optimizer_step(optimizer, model).applied)
        return applied

    assert epoch([1, 1, 1, 1, 100, 100]) == [False, False, False, True, False, False]
    optimizer.zero_grad()
    assert epoch([2, 2, 2, 2]) == [False, False, False, True]
    assert model.w.item() == pytest.approx(-3.0)


def test_T8_FC02_token_mean_is_the_mean_over_tokens(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=2, max_norm=0.0)
    model = Line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    token_losses = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0])]
    scale = token_mean_scale(strategy, sum(losses.numel() for losses in token_losses))
    for losses in token_losses:
        strategy.backward(model(losses).sum() * scale, model, optimizer)
        strategy.optimizer_step(optimizer, model)
    assert model.w.item() == pytest.approx(-2.0)  # the mean of means would be -3


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=4), accumulation=st.just(4))
def test_T8_ragged_and_cut_short(make_strategy: MakeStrategy, counts: list[int], accumulation: int) -> None:
    strategy = make_strategy(train_batch_size=accumulation, max_norm=0.0)
    model = Line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    values = [torch.arange(1.0, count + 1) * (index + 1) for index, count in enumerate(counts)]
    scale = token_mean_scale(strategy, sum(counts), micro_batches=len(counts))
    for index, losses in enumerate(values):
        strategy.backward(model(losses).sum() * scale, model, optimizer)
        strategy.optimizer_step(optimizer, model, flush=index == len(values) - 1)
    assert model.w.item() == pytest.approx(-torch.cat(values).mean().item(), rel=1e-5)


def test_T9_groups_hold_each_trainable_parameter_once(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    model = mlp()
    model.tied = model[0]
    model[3].bias.requires_grad_(False)
    optimizer = strategy.create_optimizer(model, lr=1e-3, weight_decay=0.1)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    trainable = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(held) == sorted(trainable)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {decay[id(p)] for p in model.parameters() if p.ndim >= 2} == {0.1}
    assert {decay[id(p)] for p in model.parameters() if p.ndim < 2 and p.requires_grad} == {0.0}
    assert isinstance(optimizer, torch.optim.AdamW)


def test_T9_refuses_unknown_keywords_and_nothing_to_train(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    with pytest.raises(TypeError, match="weight_decoy"):
        strategy.create_optimizer(mlp(), weight_decoy=0.1)  # type: ignore[call-arg]  # pyright: ignore
    with pytest.raises(ValueError, match="without trainable parameters"):
        strategy.create_optimizer(mlp().requires_grad_(False))


def test_FC19_betas_are_exactly_a_tuple_of_floats(make_strategy: MakeStrategy) -> None:
    import numpy as np

    strategy = make_strategy(train_batch_size=1, adam_betas=[0.8, 0.9])
    for betas in ([0.8, 0.9], np.array([0.8, 0.9]), (0.8, 0.9)):
        optimizer = strategy.create_optimizer(mlp(), betas=betas)  # type: ignore[arg-type]  # pyright: ignore
        found = optimizer.param_groups[0]["betas"]
        assert type(found) is tuple
        assert [type(value) for value in found] == [float, float]
        assert found == (0.8, 0.9)
    assert type(strategy.create_optimizer(mlp()).param_groups[0]["betas"]) is tuple


def test_T11_order_arity_and_None(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    first, second, third = mlp(1), mlp(2), mlp(3)
    optimizer = strategy.create_optimizer(first)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert strategy.prepare(second) is second
    assert strategy.prepare(None) is None
    pair, triple_back, nothing, alone = strategy.prepare(
        (second, strategy.create_optimizer(second)), (first, optimizer, scheduler), None, third
    )
    assert pair[0] is second
    assert triple_back == (first, optimizer, scheduler)
    assert nothing is None
    assert alone is third


def test_T11_eval_models_get_no_gradients(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    reference = strategy.prepare(mlp().eval())
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_T11_is_not_wrapped_twice(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1, bf16=True)
    model = strategy.prepare(mlp())
    hooks = len(model._forward_hooks)
    strategy.prepare(model)
    assert len(model._forward_hooks) == hooks


def test_T11_either_order_of_calls(make_strategy: MakeStrategy) -> None:
    results = []
    for prepare_first in (False, True):
        strategy = make_strategy(train_batch_size=1)
        model = mlp()
        if prepare_first:
            model = strategy.prepare(model)
            optimizer = strategy.create_optimizer(model, lr=1e-2)
        else:
            model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
        x, y = batch(1)
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).applied
        results.append(parameters(model))
    assert same(*results)


def test_T11_refuses_another_models_optimizer_and_other_things(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    with pytest.raises(ValueError, match="optimizer of argument 1 holds 6 parameters"):
        strategy.prepare(None, (mlp(1), sgd(mlp(2))))
    with pytest.raises(TypeError, match="argument 0 is a str"):
        strategy.prepare("model")  # type: ignore[call-overload]  # pyright: ignore


class Wrapper(nn.Module):
    """As engines and actor classes hold a model."""

    def __init__(self, **inner: nn.Module) -> None:
        super().__init__()
        for name, module in inner.items():
            setattr(self, name, module)


def test_T12_unwraps_engines_compiled_modules_and_actors(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    user = mlp()
    assert strategy.unwrap_model(user) is user
    assert strategy.unwrap_model(Wrapper(module=user)) is user
    assert strategy.unwrap_model(Wrapper(module=Wrapper(model=user))) is user
    assert strategy.unwrap_model(cast(nn.Module, torch.compile(user))) is user
    critic = Wrapper(model=user, head=nn.Linear(2, 1))
    assert strategy.unwrap_model(critic) is critic


@given(accumulation=st.integers(1, 3), beta=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_T12_moving_average_once_per_applied_update(
    make_strategy: MakeStrategy, accumulation: int, beta: float
) -> None:
    strategy = make_strategy(train_batch_size=accumulation)
    model, average = mlp(1), mlp(2)
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    expected = parameters(average)
    x, y = batch(1)
    for call in range(1, 2 * accumulation + 1):
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        strategy.optimizer_step(optimizer, model)
        strategy.moving_average(model, average, beta)
        strategy.moving_average(model, average, beta)  # asked twice, averaged once
        if call % accumulation == 0:
            expected = [beta * e + (1 - beta) * p for e, p in zip(expected, parameters(model), strict=True)]
        for mine, right in zip(parameters(average), expected, strict=True):
            torch.testing.assert_close(mine, right, atol=1e-6, rtol=1e-5)


def test_T12_moving_average_of_a_model_trained_elsewhere(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy()
    model, average = Line(1.0), Line(0.0)
    strategy.moving_average(model, average, 0.75)
    assert average.w.item() == pytest.approx(0.25)


def test_backward_says_what_is_wrong_with_a_loss(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    model = mlp()
    optimizer = sgd(model)
    x, _ = batch(2)
    with pytest.raises(ValueError, match=r"scalar loss, got shape \(2, 2\)"):
        strategy.backward(model(x), model, optimizer)
    with pytest.raises(ValueError, match="needs no gradient"):
        strategy.backward(model(x).detach().sum(), model, optimizer)
    with pytest.raises(TypeError, match="retain"):
        strategy.backward(model(x).sum(), model, optimizer, retain=True)
    strategy.offload_model(model)
    with pytest.raises(RuntimeError, match="reload_model"):
        strategy.backward(model(x).sum(), model, optimizer)
    strategy.backward(strategy.reload_model(model)(x).sum(), model, optimizer)


def test_FC44_offload_before_the_first_step(make_strategy: MakeStrategy) -> None:
    results = []
    for offload in (False, True):
        strategy = make_strategy(train_batch_size=1)
        model = mlp()
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        if offload:
            assert strategy.maybe_offload_optimizer(optimizer) is optimizer
            assert strategy.maybe_load_optimizer(optimizer) is optimizer
        x, y = batch(1)
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        strategy.optimizer_step(optimizer, model)
        results.append(parameters(model))
    assert same(*results)


def test_get_grad_norm_now_and_of_the_last_update(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(train_batch_size=1)
    model = Line(0.0)
    optimizer = sgd(model)
    strategy.backward(model(torch.tensor([-7.0])).mean(), model, optimizer)
    assert strategy.get_grad_norm(model) == pytest.approx(7.0)
    strategy.optimizer_step(optimizer, model)
    assert strategy.get_grad_norm(model) == pytest.approx(7.0)


def train_some(strategy: StrategyRecord, model: nn.Module, steps: int) -> list[Tensor]:
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    for step in range(steps):
        x, y = batch(4, step)
        strategy.backward(mse_loss(model(x).float(), y), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).applied
    return parameters(model)


def test_prepare_models_and_optimizers_trains_two_and_freezes_two(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(
        train_batch_size=1, actor_learning_rate=1e-3, critic_learning_rate=2e-3, lr_warmup_ratio=0.5, l2=0.1
    )
    actor, critic, reward, reference = mlp(1), mlp(2), mlp(3), mlp(4)
    (a, a_optim, a_sched), (c, c_optim, _), rewards, initial = strategy.prepare_models_and_optimizers(
        actor, critic, [reward], reference, strategy.args, 10
    )
    assert a is actor
    assert c is critic
    assert rewards == [reward]
    assert initial is reference
    assert not any(p.requires_grad for m in (reward, reference) for p in m.parameters())
    x, y = batch(1)
    rates = []
    for _ in range(10):
        strategy.backward(mse_loss(a(x), y), a, a_optim)
        strategy.optimizer_step(a_optim, a, a_sched)
        rates.append(a_optim.param_groups[0]["lr"])
    assert max(rates) == pytest.approx(1e-3)  # warm-up over half of the steps
    assert rates.index(max(rates)) == 4
    assert rates[-1] == pytest.approx(1e-4)  # a tenth at the end
    assert c_optim.param_groups[0]["initial_lr"] == pytest.approx(2e-3)
    assert a_optim.param_groups[0]["weight_decay"] == 0.1
    none = strategy.prepare_models_and_optimizers(mlp(5), None, None, None, strategy.args, 10)
    assert none[1:] == ((None, None, None), None, None)
