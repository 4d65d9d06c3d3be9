"""F1 and F2: the fake as its users know it, and as a full strategy once it has an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightrft import FakeStrategy, StrategyConfig, get_fake_strategy
from lightrft.engines.scripted import scripted


def test_F1_constructor_and_its_defaults() -> None:
    strategy = FakeStrategy()
    assert (strategy.seed, strategy.max_norm) == (42, 1.0)
    assert (strategy.micro_train_batch_size, strategy.train_batch_size) == (1, 128)
    named = FakeStrategy(seed=1, max_norm=0.5, micro_train_batch_size=2, train_batch_size=8, args={"l2": 0.1})
    assert (named.seed, named.max_norm, named.accumulated_gradient, named.config.l2) == (1, 0.5, 4, 0.1)
    assert get_fake_strategy({"seed": 7}).seed == 7
    assert get_fake_strategy().config == StrategyConfig()


def test_F1_rank_0_of_1_and_nulls_for_a_rollout() -> None:
    strategy = get_fake_strategy()
    assert strategy.setup_distributed() is None  # type: ignore[func-returns-value]  # what callers rely on
    assert (strategy.get_rank(), strategy.world_size, strategy.is_rank_0()) == (0, 1, True)
    with strategy.init_model_context():
        model = nn.Linear(2, 2)
    optimizer = strategy.create_optimizer(model)
    pair = (model, optimizer)
    assert strategy.prepare(pair) is pair
    assert strategy.prepare(model) is model
    assert strategy.setup_inference_engine(None, engine_type="vllm", actor=model) is None
    strategy.update_engine_weights(model)
    strategy.maybe_sleep_inference_engine()
    strategy.wakeup_inference_engine()
    assert strategy.engine_generate_local(None) == []
    assert strategy.gather_and_generate(None, all_prompt_token_ids=[[1]]) == []
    assert strategy.maybe_load_optimizer(strategy.maybe_offload_optimizer(optimizer)) is optimizer
    x = torch.ones(2)
    assert torch.equal(strategy.all_reduce(x), x)
    assert strategy.all_gather(x)[0] is x


def test_F1_save_and_load_return_path_and_client_state(tmp_path: Path) -> None:
    strategy = get_fake_strategy()
    model = nn.Linear(2, 2)
    strategy.save_ckpt(model, str(tmp_path), tag="a", client_state={"epoch": 3})
    path, client_state = strategy.load_ckpt(nn.Linear(2, 2), str(tmp_path))
    assert Path(path) == tmp_path / "a"
    assert client_state == {"epoch": 3}


def test_F2_with_an_engine_it_generates_sleeps_and_updates() -> None:
    engine = scripted()
    strategy = get_fake_strategy({"enable_engine_sleep": True}, engine=engine)
    assert strategy.setup_inference_engine(None) is engine
    completions = strategy.gather_and_generate({"max_new_tokens": 3, "n": 2}, all_prompt_token_ids=[[1, 2], [3]])
    assert [c.prompt_token_ids for c in completions] == [(1, 2), (1, 2), (3,), (3,)]
    strategy.update_engine_weights(nn.Linear(2, 2))
    assert engine.operations[:3] == ["generate", "sleep", "wake_weights"]
    assert engine.operations[3:] == ["update_weights", "wake_up", "flush_cache"]
    with pytest.raises(ValueError, match=r"[Ee]xactly one"):
        strategy.engine_generate_local({"max_new_tokens": 3})
