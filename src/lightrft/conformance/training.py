"""The laws of training (T), and the field cases that are about it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightrft.conformance.law import Law, Make
from lightrft.conformance.probes import (
    batch,
    column,
    furthest,
    line,
    lost,
    mlp,
    refused,
    rows_of,
    same,
    sgd,
    state_of,
    trained_by_torch,
    update,
    weights,
)
from lightrft.errors import UnsupportedOperation
from lightrft.ops.collectives import token_mean_scale
from lightrft.strategy.protocol import Strategy


def close_to(value: float, expected: float, tolerance: float = 1e-6) -> None:
    assert abs(value - expected) <= tolerance, f"{value} is not {expected} within {tolerance}"


def weight(strategy: Strategy, model: Module) -> float:
    """The one of a line."""
    return float(weights(strategy, model)["weight"])


# ------------------------------------------------------------------------------------------------------------ gradients


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
    model = line(1.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    for _ in range(2):
        loss = model(column(1.0)).mean() + model(column(3.0)).mean()
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model)
    close_to(1.0 - weight(strategy, model), 4.0)


def forwards_before_backwards(make: Make) -> None:
    strategy = make(train_batch_size=2 * make().world_size, max_norm=0.0)
    model = line(1.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    for _ in range(2):
        losses = [model(column(1.0)).mean(), model(column(3.0)).mean()]
        for loss in losses:
            strategy.backward(loss, model, optimizer)
            strategy.optimizer_step(optimizer, model)
    close_to(1.0 - weight(strategy, model), 4.0)


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


# -------------------------------------------------------------------------------------------------------------- windows


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


# ------------------------------------------------------------------------------------------------------------- clipping


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


# --------------------------------------------------------------------------------------------------------------- parity


def mlp_difference(make: Make, micro: int) -> float:
    """How far from the oracle six AdamW updates of an MLP end; raises where the norms differ on the way."""
    strategy = make(train_batch_size=8, micro_train_batch_size=micro, l2=0.1)
    model = mlp()
    optimizer = strategy.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    model, optimizer = strategy.prepare((model, optimizer))
    batches = [batch(8, seed) for seed in range(6)]
    norms = [update(strategy, model, optimizer, data, scale=3.0).grad_norm or 0.0 for data in batches]
    losses = [lambda model, data=data: 3.0 * mse_loss(model(data[0]), data[1]) for data in batches]
    expected, expected_norms = trained_by_torch(mlp(), losses, lr=1e-2, weight_decay=0.1)
    for norm, right in zip(norms, expected_norms, strict=True):
        close_to(norm, right, 1e-5 * right)
    return furthest(weights(strategy, model), expected)


def mlp_parity(make: Make, micro: int) -> None:
    difference = mlp_difference(make, micro)
    assert difference <= 1e-6, f"after 6 updates parameters differ by {difference}"


def qwen2(seed: int = 0) -> Module:
    """Two layers, tied embeddings."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers' own
    return made.train()


def next_token_loss(model: Module, ids: Tensor) -> Tensor:
    """The mean over samples and positions."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def language_model_difference(make: Make, micro: int) -> float:
    """How far from the oracle five AdamW updates of a language model end."""
    strategy = make(train_batch_size=4, micro_train_batch_size=micro)
    model = qwen2()
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-3)))
    batches = [torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    for ids in batches:
        for rows in rows_of(strategy):
            strategy.backward(next_token_loss(model, ids[rows]), model, optimizer)
            strategy.optimizer_step(optimizer, model)
    losses = [lambda model, ids=ids: next_token_loss(model, ids) for ids in batches]
    expected, _ = trained_by_torch(qwen2(), losses, lr=1e-3)
    return furthest(weights(strategy, model), expected)


def language_model_parity(make: Make, micro: int) -> None:
    difference = language_model_difference(make, micro)
    assert difference <= 5e-5, f"after 5 updates parameters differ by {difference}"


def made_without_memory(make: Make) -> None:
    """``meta_init``: no rank holds the whole model at first, all ranks start alike, and again in the next run."""
    starts = []
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        strategy = make(train_batch_size=make().world_size, seed=5)
        try:
            with strategy.init_model_context(meta_init=True):
                model = qwen2()
        except UnsupportedOperation:
            return
        assert all(
            parameter.is_meta or parameter.numel() == 0 for parameter in model.parameters() if parameter.ndim > 1
        )
        optimizer = strategy.create_optimizer(model, lr=1e-3, weight_decay=0.1)
        decayed = [len(group["params"]) for group in optimizer.param_groups if group["weight_decay"]]
        model, optimizer = strategy.prepare((model, optimizer))
        found = weights(strategy, model)
        starts.append(found)
        expected = weights_of_shape(qwen2())
        assert decayed == [sum(len(shape) > 1 for shape in expected.values())], "weight decay goes by other shapes"
        assert {name: tuple(value.shape) for name, value in found.items()} == expected
        assert all(bool((value == 1).all()) for name, value in found.items() if "norm" in name)
        assert 0.01 < float(found["model.embed_tokens.weight"].std()) < 0.04
        held = dict(strategy.unwrap_model(model).named_buffers())
        for name, buffer in qwen2().named_buffers():
            assert torch.equal(held[name].float(), buffer.float()), f"the buffer {name} has other values"
        for value in found.values():
            assert all(torch.equal(value, other) for other in strategy.all_gather(value)), "ranks start apart"
        with torch.no_grad():
            first = float(next_token_loss(model, ids))
        for _ in range(3):
            strategy.backward(next_token_loss(model, ids), model, optimizer)
            assert strategy.optimizer_step(optimizer, model).applied
        with torch.no_grad():
            assert float(next_token_loss(model, ids)) < first
    assert same(*starts), "the same seed gives another start"


def weights_of_shape(model: Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


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


# ------------------------------------------------------------------------------------------------ optimizers, preparing


def groups_hold_each_parameter_once(make: Make) -> None:
    strategy = make()
    model = mlp()
    model.append(model[0])  # tied
    model[3].bias.requires_grad_(False)
    optimizer = strategy.create_optimizer(model, lr=1e-3, weight_decay=0.1)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {decay[id(p)] for p in model.parameters() if p.ndim >= 2} == {0.1}
    assert {decay[id(p)] for p in model.parameters() if p.ndim < 2 and p.requires_grad} == {0.0}
    assert isinstance(optimizer, AdamW)


def betas_are_floats(make: Make) -> None:
    strategy = make(adam_betas=[0.8, 0.9])
    found = strategy.create_optimizer(mlp()).param_groups[0]["betas"]
    assert type(found) is tuple
    assert [type(value) for value in found] == [float, float]
    assert found == (0.8, 0.9)


def order_and_arity(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    first, second, third = mlp(1), mlp(2), mlp(3).eval()
    optimizer = strategy.create_optimizer(first)
    scheduler = StepLR(optimizer, 1)
    assert strategy.prepare(None) is None
    pair, triple, nothing, alone = strategy.prepare(
        (second, strategy.create_optimizer(second)), (first, optimizer, scheduler), None, third
    )
    assert strategy.unwrap_model(pair[0]) is second
    assert strategy.unwrap_model(triple[0]) is first
    assert triple[1] is optimizer
    assert triple[2] is scheduler
    assert nothing is None
    assert strategy.unwrap_model(alone) is third
    assert not any(parameter.requires_grad for parameter in alone.parameters())
    assert strategy.prepare(pair[0]) is pair[0], "a prepared model was prepared again"
    assert update(strategy, pair[0], pair[1], batch(strategy.train_batch_size)).applied


def the_other_order(make: Make) -> None:
    """Prepare the model, then make its optimizer: it works, or what is then missing is said."""
    strategy = make(train_batch_size=make().world_size)
    model = strategy.prepare(mlp())
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    before, data = weights(strategy, model), batch(strategy.train_batch_size)
    try:
        assert update(strategy, model, optimizer, data).applied
    except ValueError as error:
        if "prepare((model, optimizer))" not in str(error):
            raise
        model, optimizer = strategy.prepare((model, optimizer))
        assert update(strategy, model, optimizer, data).applied
    assert not same(before, weights(strategy, model))


def foreign_optimizer(make: Make) -> None:
    strategy = make()
    refused(
        ValueError, "optimizer of argument 1 holds 6 parameters", lambda: strategy.prepare(None, (mlp(1), sgd(mlp(2))))
    )
    wrong: Any = "model"
    refused(TypeError, "argument 1 is a str", lambda: strategy.prepare(None, wrong))


def losses_that_cannot_be(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    model = mlp()
    model, optimizer = strategy.prepare((model, sgd(model)))
    x, _ = batch(2)
    backward = strategy.backward
    refused(ValueError, "scalar loss, got shape (2, 2)", lambda: backward(model(x), model, optimizer))
    refused(ValueError, "needs no gradient", lambda: backward(torch.tensor(1.0), model, optimizer))
    refused(TypeError, "retain", lambda: backward(model(x).sum(), model, optimizer, retain=True))


def moving_average(make: Make, accumulation: int, beta: float, sharded: bool) -> None:
    strategy = make(train_batch_size=accumulation * make().world_size)
    model = mlp(1)
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    average: Module = mlp(2).eval()
    expected = {name: parameter.detach().clone() for name, parameter in average.named_parameters()}
    if sharded:
        average = strategy.prepare(average)
    x, y = batch(1)
    for call in range(1, 2 * accumulation + 1):
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        strategy.optimizer_step(optimizer, model)
        strategy.moving_average(model, average, beta)
        strategy.moving_average(model, average, beta)  # asked twice, averaged once
        if call % accumulation == 0:
            now = weights(strategy, model)
            expected = {name: beta * expected[name] + (1 - beta) * now[name] for name in expected}
        difference = furthest(weights(strategy, average), expected)
        assert difference <= 1e-6, f"the average is off by {difference}"


def four_models(make: Make) -> None:
    world = make().world_size
    strategy = make(
        train_batch_size=world, actor_learning_rate=1e-3, critic_learning_rate=2e-3, lr_warmup_ratio=0.5, l2=0.1
    )
    actor, critic, reward, reference = mlp(1), mlp(2), mlp(3), mlp(4)
    trained, valued, rewards, initial = strategy.prepare_models_and_optimizers(
        actor, critic, [reward], reference, strategy.args, 10
    )
    assert isinstance(rewards, list)
    assert initial is not None
    frozen = (rewards[0], initial)
    assert not any(parameter.requires_grad for model in frozen for parameter in model.parameters())
    kept = [weights(strategy, model) for model in frozen]
    x, y = batch(world)
    rates = []
    for _ in range(10):
        with torch.no_grad():
            target = rewards[0](x) + initial(x)
        assert target.shape == y.shape
        assert update(strategy, trained[0], trained[1], (x, y)).applied
        trained[2].step()
        assert update(strategy, valued[0], valued[1], (x, y)).applied
        valued[2].step()
        rates.append(trained[1].param_groups[0]["lr"])
    close_to(max(rates), 1e-3, 1e-9)  # warm-up over half of the steps
    assert rates.index(max(rates)) == 4
    close_to(rates[-1], 1e-4, 1e-9)  # a tenth at the end
    close_to(valued[1].param_groups[0]["initial_lr"], 2e-3, 1e-9)
    assert trained[1].param_groups[0]["weight_decay"] == 0.1
    assert all(same(old, weights(strategy, model)) for old, model in zip(kept, frozen, strict=True))
    assert not same(weights(strategy, trained[0]), weights(strategy, valued[0]))


def offload_before_the_first_step(make: Make) -> None:
    found = []
    for offload in (False, True):
        strategy = make(train_batch_size=make().world_size)
        model = mlp()
        model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
        if offload:
            assert strategy.maybe_offload_optimizer(optimizer) is optimizer
            assert strategy.maybe_load_optimizer(optimizer) is optimizer
        update(strategy, model, optimizer, batch(strategy.train_batch_size))
        found.append(weights(strategy, model))
    assert same(*found)


def backward_after_offload(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    model = mlp()
    model, optimizer = strategy.prepare((model, sgd(model)))
    loss = model(batch(1)[0]).sum()
    strategy.offload_model(model)
    refused(RuntimeError, "reload_model", lambda: strategy.backward(loss, model, optimizer))
    model = strategy.reload_model(model)
    assert update(strategy, model, optimizer, batch(strategy.train_batch_size)).applied


# ----------------------------------------------------------------------------------------------------------------- bf16


def small_updates_are_not_lost(make: Make) -> None:
    strategy = make(bf16=True, train_batch_size=make().world_size, max_norm=0.0)
    model = line(1.0)
    model, optimizer = strategy.prepare((model, sgd(model, lr=2e-5)))  # bf16 has steps of 4e-3 below 1
    x = column(1.0)
    for _ in range(1000):
        strategy.backward(model(x).float().mean(), model, optimizer)
        strategy.optimizer_step(optimizer, model)
    close_to(weight(strategy, model), 1.0 - 1000 * 2e-5, 3e-3)


def computes_in_bf16(make: Make) -> None:
    strategy = make(bf16=True, train_batch_size=make().world_size)
    model = mlp()
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model)))
    x, _ = batch(4)
    exact = mlp()(x)
    found = model(x).float()
    difference = float((found - exact).detach().abs().max())
    assert 0 < difference < 0.1, f"bf16 differs from fp32 by {difference}"
    assert bool((found == found.bfloat16().float()).all()), "the output is not that of a bfloat16 layer"
    assert update(strategy, model, optimizer, batch(strategy.train_batch_size)).applied


def gradients_add_up_in_fp32(make: Make) -> None:
    """1, 2**-9 and -1 add up to 2**-9; in bfloat16, which has 8 bits, they add up to 0."""
    strategy = make(bf16=True, train_batch_size=4 * make().world_size, max_norm=0.0)
    model = line(0.0)
    model, optimizer = strategy.prepare((model, sgd(model, lr=4.0)))
    for value in (1.0, 2.0**-9, -1.0, 0.0):
        strategy.backward(model(column(value)).float().mean(), model, optimizer)
        strategy.optimizer_step(optimizer, model)
    close_to(weight(strategy, model), -(2.0**-9), 1e-6)


BAD = (float("inf"), float("-inf"), float("nan"))
LAWS = (
    Law(
        "T1: the gradient is that of the mean over the batch of all ranks",
        gradient_of_the_batch,
        {"accumulation": st.integers(1, 4), "micro": st.integers(1, 2), "seed": st.integers(0, 100)},
    ),
    Law("FC01: the accumulation length does not change it", accumulation_length, {"micro": st.sampled_from([1, 2, 4])}),
    Law("T1: two forwards, one backward", two_forwards_one_backward),
    Law("T1: all forwards before all backwards", forwards_before_backwards),
    Law("T2: an update shows in the next forward", an_update_shows_in_the_next_forward),
    Law("FC03: the caller's loss is left alone", callers_loss),
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
    Law("FC04: the norm is of the whole model", norm_of_the_whole_model),
    Law(
        "FC05: the model that steps is the one that is clipped",
        the_model_that_steps_is_clipped,
        {"made_last": st.sampled_from(["actor", "critic"])},
    ),
    Law("T4 FC06: a norm that is not finite on one rank skips the update on all", skips_what_is_not_finite,
        {"bad": st.sampled_from(BAD)}),
    Law("T5: the scheduler advances once for each applied update", scheduler_follows_updates),
    Law("T6: an MLP ends where torch in one process ends", mlp_parity, {"micro": st.sampled_from([1, 2])}),
    Law("T6: a two-layer Qwen2 ends where torch in one process ends", language_model_parity,
        {"micro": st.sampled_from([1, 2])}),
    Law("W4: made without memory", made_without_memory),
    Law("T7 FC21: a window cut short is the mean of what it has", cut_short,
        {"have": st.integers(1, 4), "extra_call": st.booleans()}),
    Law("FC21: six micro-batches of four", six_of_four),
    Law("FC21: zero_grad begins the next epoch clean", nothing_leaks_into_the_next_epoch),
    Law("T8 FC02: token mean is the mean over tokens", token_mean),
    Law("T8: ragged, and cut short", ragged_token_mean,
        {"counts": st.lists(st.integers(1, 6), min_size=1, max_size=4)}),
    Law("T9: groups hold each trainable parameter once", groups_hold_each_parameter_once),
    Law("FC19: betas are a tuple of floats", betas_are_floats),
    Law("T11: order, arity, None, eval models, nothing twice", order_and_arity),
    Law("T11: the other order of calls works, or says what is missing", the_other_order),
    Law("T11: another model's optimizer is refused", foreign_optimizer),
    Law("backward says what is wrong with a loss", losses_that_cannot_be),
    Law("backward on an offloaded model is refused", backward_after_offload),
    Law("T12: the moving average moves once per applied update", moving_average,
        {"accumulation": st.integers(1, 2), "beta": st.sampled_from([0.0, 0.5, 0.9, 1.0]), "sharded": st.booleans()}),
    Law("actor, critic, reward and reference models together", four_models),
    Law("FC44: offload before the first step", offload_before_the_first_step),
    Law("T10: a thousand small updates are not lost", small_updates_are_not_lost, bf16=True),
    Law("T10: forward is in bfloat16", computes_in_bf16, bf16=True),
    Law("T10: gradients add up in fp32", gradients_add_up_in_fp32, bf16=True),
)  # fmt: skip
