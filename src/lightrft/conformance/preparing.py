"""The laws of what is trained (T9, T11, T12): optimizers, ``prepare``, averages, models together."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn import Module
from torch.nn.functional import mse_loss
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from lightrft.conformance.checkpoints import shared_directory
from lightrft.conformance.law import Law, Make
from lightrft.conformance.probes import (
    batch,
    close_to,
    column,
    furthest,
    line,
    mlp,
    refused,
    same,
    sgd,
    update,
    weight,
    weights,
)


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


def an_average_after_a_load(make: Make) -> None:
    """A checkpoint sets the number of updates back; the average goes on with those that are applied."""
    strategy = make(train_batch_size=make().world_size, max_norm=0.0)
    model, average = line(1.0), line(1.0)
    model, optimizer = strategy.prepare((model, sgd(model)))
    average = strategy.prepare(average.eval().requires_grad_(False))
    seen = []
    with shared_directory(strategy) as directory:
        strategy.save_ckpt(model, directory)
        for _ in range(2):
            strategy.backward(model(column(1.0)).mean(), model, optimizer)
            strategy.optimizer_step(optimizer, model)
            strategy.moving_average(model, average, beta=0.5)
            seen.append(weight(strategy, average))
            strategy.load_ckpt(model, directory)
    assert seen == [0.5, 0.25], f"the average went through {seen}, not through 0.5 and 0.25"


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


def offload_between_updates(make: Make) -> None:
    """It moves what the optimizer remembers, and keeps it."""
    found = []
    for offload in (False, True):
        strategy = make(train_batch_size=make().world_size)
        model = mlp()
        model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
        for seed in range(3):
            update(strategy, model, optimizer, batch(strategy.train_batch_size, seed))
            if offload:
                assert strategy.maybe_offload_optimizer(optimizer) is optimizer
                assert strategy.maybe_load_optimizer(optimizer) is optimizer
        found.append(weights(strategy, model))
    assert same(*found), f"parameters differ by {furthest(*found)}"


def backward_after_offload(make: Make) -> None:
    strategy = make(train_batch_size=make().world_size)
    model = mlp()
    model, optimizer = strategy.prepare((model, sgd(model)))
    loss = model(batch(1)[0]).sum()
    strategy.offload_model(model)
    refused(RuntimeError, "reload_model", lambda: strategy.backward(loss, model, optimizer))
    model = strategy.reload_model(model)
    assert update(strategy, model, optimizer, batch(strategy.train_batch_size)).applied


LAWS = (
    Law("T9: groups hold each trainable parameter once", groups_hold_each_parameter_once),
    Law("C2 FC19: betas are a tuple of floats", betas_are_floats),
    Law("T11: order, arity, None, eval models, nothing twice", order_and_arity),
    Law("T11: the other order of calls works, or says what is missing", the_other_order),
    Law("T11: another model's optimizer is refused", foreign_optimizer),
    Law("T13: backward says what is wrong with a loss", losses_that_cannot_be),
    Law("M1: backward on an offloaded model is refused", backward_after_offload),
    Law("T12: the moving average moves once per applied update", moving_average,
        {"accumulation": st.integers(1, 2), "beta": st.sampled_from([0.0, 0.5, 0.9, 1.0]), "sharded": st.booleans()}),
    Law("T12: an average goes on after a load", an_average_after_a_load, needs="checkpoints"),
    Law("T11: actor, critic, reward and reference models together", four_models),
    Law("M1 FC44: offload before the first step", offload_before_the_first_step),
    Law("M1: offload between updates loses nothing", offload_between_updates),
)  # fmt: skip
