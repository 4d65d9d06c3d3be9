"""The laws of training (T1 to T5, T7, T8): gradients, windows, clipping."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightrft.conformance.law import Law, Make
from lightrft.conformance.probes import (
    batch,
    close_to,
    column,
    furthest,
    line,
    lost,
    mlp,
    rows_of,
    same,
    sgd,
    state_of,
    update,
    weight,
    weights,
)
from lightrft.ops.collectives import token_mean_scale


def gradient_of_the_batch(make: Make, accumulation: int, micro: int, seed: int) -> None:
    world = make().world_size
    size = accumulation * micro * world
    strategy = make(train_batch_size=size, micro_train_batch_size=micro, max_norm=0.0)
    model, reference = mlp(), mlp()
    model, optimizer = strategy.prepare((model, sgd(model)))
    before = weights(strategy, model)
    data = batch(size, seed)
    update(strategy, model, optimizer, data)
    torch.autograd.backward(mse_loss(reference(data[0]), data[1]))
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found = lost(before, weights(strategy, model))
    assert furthest(found, expected) <= 1e-6, f"the gradient is off by {furthest(found, expected)}"


def accumulation_length(make: Make, micro: int) -> None:
    world = make().world_size
    if micro * world > 4:
        return
    strategy = make(train_batch_size=4, micro_train_batch_size=micro, max_norm=0.0)
    model = line(1.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    x = column(1.0, 2.0, 3.0, 4.0)
    for rows in rows_of(strategy):
        strategy.backward(model(x[rows]).square().mean(), model, optimizer)
        strategy.optimizer_step(optimizer, model)
    close_to(1.0 - weight(strategy, model), 15.0)


def callers_loss(make: Make) -> None:
    strategy = make(train_batch_size=4 * make().world_size)
    model = line()
    model, optimizer = strategy.prepare((model, sgd(model)))
    loss = model(column(3.0)).mean()
    strategy.backward(loss, model, optimizer)
    assert float(loss.detach()) == 3.0, f"the caller's loss became {float(loss.detach())}"


def two_forwards_one_backward(make: Make) -> None:
    strategy = make(train_batch_size=2 * make().world_size, max_norm=0.0)
    rank = strategy.get_rank()
    model = line(1.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    for _ in range(2):
        loss = model(column(1.0 + rank)).mean() + model(column(3.0 + rank)).mean()
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model)
    close_to(1.0 - weight(strategy, model), 4.0 + (strategy.world_size - 1))


def forwards_before_backwards(make: Make) -> None:
    strategy = make(train_batch_size=2 * make().world_size, max_norm=0.0)
    rank = strategy.get_rank()
    model = line(1.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    for _ in range(2):
        losses = [model(column(1.0 + rank)).mean(), model(column(3.0 + rank)).mean()]
        for loss in losses:
            strategy.backward(loss, model, optimizer)
            strategy.optimizer_step(optimizer, model)
    close_to(1.0 - weight(strategy, model), 4.0 + (strategy.world_size - 1))


def an_update_shows_in_the_next_forward(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size, max_norm=0.0)
    model = line(1.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    x = column(2.0)
    for expected in (-1.0, -3.0):
        strategy.backward(model(x).mean(), model, optimizer)
        with torch.no_grad():
            model(x)  # what a forward without a backward keeps must not outlive the update
        strategy.optimizer_step(optimizer, model)
        with torch.no_grad():
            close_to(float(model(x)), 2.0 * expected)


def applies_on_each_ath_call(make: Make, accumulation: int, calls: int) -> None:
    world = make().world_size
    strategy = make(train_batch_size=accumulation * world)
    model = mlp()
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    scheduler = StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    x, y = batch(1, strategy.get_rank())
    for call in range(1, calls + 1):
        before, state = weights(strategy, model), state_of(optimizer)
        epoch = scheduler.last_epoch
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        outcome = strategy.optimizer_step(optimizer, model, scheduler)
        due = call % accumulation == 0
        assert outcome.applied is due
        assert outcome.micro_step == (call - 1) % accumulation + 1
        assert (outcome.grad_norm is not None) is due
        assert same(before, weights(strategy, model)) is not due
        assert scheduler.last_epoch == epoch + due
        if not due:
            assert state == state_of(optimizer), "the optimizer's state changed between updates"


def two_models_alone(make: Make, first: str) -> None:
    strategy = make(train_batch_size=2 * make().world_size)
    actor, critic = line(1.0), line(1.0)
    makers = {"actor": lambda: sgd(actor), "critic": lambda: sgd(critic)}
    made = {name: makers[name]() for name in sorted(makers, key=lambda name: name != first)}
    prepared = strategy.prepare((actor, made["actor"]), (critic, made["critic"]))
    (ready_actor, actor_optimizer), (ready_critic, critic_optimizer) = prepared
    x = column(1.0)
    strategy.backward(ready_actor(x).mean(), ready_actor, actor_optimizer)
    assert not strategy.optimizer_step(actor_optimizer, ready_actor).applied
    strategy.backward(ready_critic(x).mean(), ready_critic, critic_optimizer)
    assert not strategy.optimizer_step(critic_optimizer, ready_critic).applied
    strategy.backward(ready_actor(x).mean(), ready_actor, actor_optimizer)
    assert strategy.optimizer_step(actor_optimizer, ready_actor).applied
    close_to(weight(strategy, ready_critic), 1.0, 0.0)
    close_to(weight(strategy, ready_actor), 0.0, 1e-5)
    strategy.backward(ready_critic(x).mean(), ready_critic, critic_optimizer)
    assert strategy.optimizer_step(critic_optimizer, ready_critic).applied, "its own second call, whatever came between"
    close_to(weight(strategy, ready_critic), 0.0, 1e-5)


def cut_short(make: Make, have: int, extra_call: bool) -> None:
    world = make().world_size
    strategy = make(train_batch_size=4 * world, max_norm=0.0)
    model = line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    applied = False
    for index in range(have):
        strategy.backward(model(column(float(index + 1))).mean(), model, optimizer)
        flush = index == have - 1 and not extra_call
        applied = strategy.optimizer_step(optimizer, model, flush=flush).applied
    if extra_call and not applied:
        applied = strategy.optimizer_step(optimizer, model, flush=True).applied
    assert applied
    close_to(weight(strategy, model), -sum(range(1, have + 1)) / have)
    assert not strategy.optimizer_step(optimizer, model, flush=True).applied, "there was nothing left"


def six_of_four(make: Make) -> None:
    strategy = make(train_batch_size=4 * make().world_size, max_norm=0.0)
    model = line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    seen = [0.0]
    for index in range(6):
        strategy.backward(model(column(float(index + 1))).mean(), model, optimizer)
        if strategy.optimizer_step(optimizer, model, flush=index == 5).applied:
            seen.append(weight(strategy, model))
    steps = [a - b for a, b in pairwise(seen)]
    assert len(steps) == 2
    close_to(steps[0], 2.5)
    close_to(steps[1], 5.5)


def nothing_leaks_into_the_next_epoch(make: Make) -> None:
    strategy = make(train_batch_size=4 * make().world_size, max_norm=0.0)
    model = line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))

    def epoch(*values: float) -> list[bool]:
        applied = []
        for value in values:
            strategy.backward(model(column(value)).mean(), model, optimizer)
            applied.append(strategy.optimizer_step(optimizer, model).applied)
        return applied

    assert epoch(1, 1, 1, 1, 100, 100) == [False, False, False, True, False, False]
    optimizer.zero_grad()
    # A is counted by calls: the two of the epoch before still count, their gradients do not.
    assert epoch(2, 2, 2, 2) == [False, False, False, True]
    close_to(weight(strategy, model), -3.0)


def clips_as_torch(make: Make, max_norm: float, scale: float) -> None:
    world = make().world_size
    strategy = make(train_batch_size=2 * world, micro_train_batch_size=2, max_norm=max_norm)
    model, reference = mlp(), mlp()
    model, optimizer = strategy.prepare((model, sgd(model)))
    data = batch(2 * world)
    outcome = update(strategy, model, optimizer, data, scale=scale)
    torch.autograd.backward(mse_loss(reference(data[0]), data[1]) * scale)
    norm = float(nn.utils.clip_grad_norm_(reference.parameters(), max_norm or float("inf")))
    sgd(reference).step()
    assert outcome.grad_norm is not None
    close_to(outcome.grad_norm, norm, 2e-6 * norm)
    close_to(strategy.get_grad_norm(model), norm, 2e-6 * norm)
    expected = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    difference = furthest(weights(strategy, model), expected)
    assert difference <= 1e-6 * max(1.0, scale), f"parameters differ by {difference}"


def norm_of_the_whole_model(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size, max_norm=1.0)
    model = line(0.0, bias=0.0)
    first, second = model.parameters()
    optimizer: Optimizer = SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    ready, optimizer = strategy.prepare((model, optimizer))
    strategy.backward(4 * ready(column(0.75)).mean(), ready, optimizer)  # gradients 3 and 4
    outcome = strategy.optimizer_step(optimizer, ready)
    assert outcome.grad_norm is not None
    close_to(outcome.grad_norm, 5.0, 1e-5)
    found = weights(strategy, ready)
    close_to(float(found["weight"]), -0.6, 1e-5)
    close_to(float(found["bias"]), -0.8, 1e-5)


def the_model_that_steps_is_clipped(make: Make, made_last: str) -> None:
    strategy = make(train_batch_size=make().world_size, max_norm=1.0)
    actor, critic = line(0.0), line(0.0)
    makers = {"actor": lambda: sgd(actor), "critic": lambda: sgd(critic)}
    made = {name: makers[name]() for name in sorted(makers, key=lambda name: name == made_last)}
    prepared = strategy.prepare((actor, made["actor"]), (critic, made["critic"]))
    (ready_actor, actor_optimizer), (ready_critic, critic_optimizer) = prepared
    x = column(10.0)
    strategy.backward(ready_critic(x).mean(), ready_critic, critic_optimizer)
    strategy.backward(ready_actor(x).mean(), ready_actor, actor_optimizer)
    outcome = strategy.optimizer_step(actor_optimizer, ready_actor)
    assert outcome.grad_norm is not None
    close_to(outcome.grad_norm, 10.0, 1e-4)
    close_to(weight(strategy, ready_actor), -1.0, 1e-5)
    close_to(weight(strategy, ready_critic), 0.0, 0.0)
    outcome = strategy.optimizer_step(critic_optimizer, ready_critic)
    close_to(outcome.grad_norm or 0.0, 10.0, 1e-4)


def skips_what_is_not_finite(make: Make, bad: float) -> None:
    world = make().world_size
    strategy = make(train_batch_size=2 * world)
    model = mlp()
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    scheduler = StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    x, y = batch(2 * world)
    on_last_rank = strategy.get_rank() == world - 1

    def window(factor: float) -> bool:
        outcomes = []
        for index, rows in enumerate(rows_of(strategy)):
            scale = factor if index == 0 and on_last_rank else 1.0
            strategy.backward(mse_loss(model(x[rows]), y[rows]) * scale, model, optimizer)
            outcomes.append(strategy.optimizer_step(optimizer, model, scheduler))
        first, last = outcomes
        told = strategy.all_gather(last.skipped_nonfinite)
        assert len(set(told)) == 1, f"ranks tell different things of one update: {told}"
        assert not first.applied
        assert last.skipped_nonfinite is not last.applied
        return last.applied

    assert window(1.0)
    before, state, epoch = weights(strategy, model), state_of(optimizer), scheduler.last_epoch
    assert not window(bad)
    assert same(before, weights(strategy, model)), "a skipped update changed parameters"
    assert state == state_of(optimizer), "a skipped update changed the optimizer's state"
    assert scheduler.last_epoch == epoch
    assert window(1.0)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in weights(strategy, model).values())


def scheduler_follows_updates(make: Make) -> None:
    strategy = make(train_batch_size=3 * make().world_size)
    model = mlp()
    optimizer = strategy.create_optimizer(model, lr=1.0)
    scheduler = StepLR(optimizer, 1, 0.1)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    x, y = batch(1)
    rates = []
    for _ in range(7):
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
    for rate, expected in zip(rates, [1.0, 1.0, 0.1, 0.1, 0.1, 0.01, 0.01], strict=True):
        close_to(rate, expected, 1e-9)


def token_mean(make: Make) -> None:
    world = make().world_size
    strategy = make(train_batch_size=2 * world, max_norm=0.0)
    model = line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    # Every rank has the same tokens, so the mean over all of them is 2 at any world size; the mean of means would be 3.
    token_losses = [column(1.0, 1.0, 1.0), column(5.0)]
    scale = token_mean_scale(strategy, sum(losses.numel() for losses in token_losses))
    for losses in token_losses:
        strategy.backward(model(losses).sum() * scale, model, optimizer)
        strategy.optimizer_step(optimizer, model)
    close_to(weight(strategy, model), -2.0)


def ragged_token_mean(make: Make, counts: list[int]) -> None:
    """Ranks and micro-batches hold different numbers of tokens, and the window is cut short."""
    world = make().world_size
    strategy = make(train_batch_size=4 * world, max_norm=0.0)
    model = line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model)))

    def tokens(rank: int) -> list[Tensor]:
        return [column(*(float(n + 1 + rank) * (i + 1) for n in range(count + rank))) for i, count in enumerate(counts)]

    mine = tokens(strategy.get_rank())
    scale = token_mean_scale(strategy, sum(part.numel() for part in mine), micro_batches=len(counts))
    for index, losses in enumerate(mine):
        strategy.backward(model(losses).sum() * scale, model, optimizer)
        strategy.optimizer_step(optimizer, model, flush=index == len(mine) - 1)
    every = torch.cat([part for rank in range(world) for part in tokens(rank)])
    expected = float(every.double().mean())
    close_to(weight(strategy, model), -expected, 1e-5 * expected)


BAD = (float("inf"), float("-inf"), float("nan"))


def an_empty_window_is_not_ended(make: Make) -> None:
    """It counts as no call: the window after it is a whole one."""
    strategy = make(train_batch_size=2 * make().world_size, max_norm=0.0)
    model = line(1.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    for _ in range(2):
        assert not strategy.optimizer_step(optimizer, model, flush=True).applied
        applied = []
        for x in (1.0, 3.0):
            strategy.backward(model(column(x)).mean(), model, optimizer)
            applied.append(strategy.optimizer_step(optimizer, model).applied)
        assert applied == [False, True], f"the calls of a whole window applied {applied}"
    close_to(1.0 - weight(strategy, model), 4.0)


LAWS = (
    Law(
        "T1: the gradient is that of the mean over the batch of all ranks",
        gradient_of_the_batch,
        {"accumulation": st.integers(1, 4), "micro": st.integers(1, 2), "seed": st.integers(0, 100)},
    ),
    Law("T1 FC01: the accumulation length does not change it", accumulation_length, {"micro": st.sampled_from([1, 2, 4])}),
    Law("T1: two forwards, one backward", two_forwards_one_backward),
    Law("T1: all forwards before all backwards", forwards_before_backwards),
    Law("T2: an update shows in the next forward", an_update_shows_in_the_next_forward),
    Law("T1 FC03: the caller's loss is left alone", callers_loss),
    Law(
        "T2: applies on each A-th call and changes nothing between",
        applies_on_each_ath_call,
        {"accumulation": st.integers(1, 3), "calls": st.integers(1, 6)},
    ),
    Law(
        "T2: two models under one name count and step alone",
        two_models_alone,
        {"first": st.sampled_from(["actor", "critic"])},
    ),
    Law(
        "T3: clips as torch does, by the norm before",
        clips_as_torch,
        {"max_norm": st.sampled_from([0.0, 0.01, 0.5, 1.0, 100.0]), "scale": st.sampled_from([0.01, 1.0, 50.0])},
    ),
    Law("T3 FC04: the norm is of the whole model", norm_of_the_whole_model),
    Law(
        "T3 FC05: the model that steps is the one that is clipped",
        the_model_that_steps_is_clipped,
        {"made_last": st.sampled_from(["actor", "critic"])},
    ),
    Law("T4 FC06: a norm that is not finite on one rank skips the update on all", skips_what_is_not_finite,
        {"bad": st.sampled_from(BAD)}),
    Law("T5: the scheduler advances once for each applied update", scheduler_follows_updates),
    Law("T7 FC21: a window cut short is the mean of what it has", cut_short,
        {"have": st.integers(1, 4), "extra_call": st.booleans()}),
    Law("T7: an empty window is not ended", an_empty_window_is_not_ended),
    Law("T7 FC21: six micro-batches of four", six_of_four),
    Law("T7 FC21: zero_grad begins the next epoch clean", nothing_leaks_into_the_next_epoch),
    Law("T8 FC02: token mean is the mean over tokens", token_mean),
    Law("T8: ragged, and cut short", ragged_token_mean,
        {"counts": st.lists(st.integers(1, 6), min_size=1, max_size=4)}),
)  # fmt: skip
