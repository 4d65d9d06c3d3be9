"""The laws of numbers (T6, T10, W4): every backend ends where plain torch in one process ends."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import mse_loss

from lightrft.conformance.law import Law, Make
from lightrft.conformance.probes import (
    batch,
    close_to,
    column,
    furthest,
    line,
    mlp,
    rows_of,
    same,
    sgd,
    trained_by_torch,
    update,
    weight,
    weights,
)
from lightrft.errors import UnsupportedOperation


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


LAWS = (
    Law("T6: an MLP ends where torch in one process ends", mlp_parity, {"micro": st.sampled_from([1, 2])}),
    Law("T6: a two-layer Qwen2 ends where torch in one process ends", language_model_parity,
        {"micro": st.sampled_from([1, 2])}),
    Law("W4: made without memory", made_without_memory),
    Law("T10: a thousand small updates are not lost", small_updates_are_not_lost, needs="bf16"),
    Law("T10: forward is in bfloat16", computes_in_bf16, needs="bf16"),
    Law("T10: gradients add up in fp32", gradients_add_up_in_fp32, needs="bf16"),
)  # fmt: skip
