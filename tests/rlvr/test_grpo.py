"""The trainer's loop: its numbers, and that it learns nothing from held-out tasks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from lightrft.engines.protocol import Completion
from lightrft.errors import ConfigError, UnsupportedOperation
from lightrft.rlvr import grpo
from lightrft.rlvr.config import TrainConfig, checked, prompts_per_rollout
from lightrft.rlvr.session import build_trainer
from lightrft.strategy.config import StrategyConfig, to_dict
from lightrft.strategy.strategy import get_strategy

STRATEGY = StrategyConfig(
    backend="local",
    engine_type="hf",
    bf16=False,
    train_batch_size=8,
    micro_train_batch_size=4,
    n_samples_per_prompt=4,
    actor_learning_rate=1e-3,
    lr_warmup_ratio=0.0,
)
CONFIG = TrainConfig(
    model="tiny", task="copy", reward="support:varied", steps=3, max_new_tokens=2, eval_every=0, strategy=STRATEGY
)


def trainer_of(config: TrainConfig) -> grpo.Trainer:
    strategy = get_strategy(checked(config).strategy)
    strategy.setup_distributed()
    return build_trainer(config, strategy)


def with_strategy(**fields: object) -> TrainConfig:
    return evolve(CONFIG, strategy=StrategyConfig.from_args({**to_dict(STRATEGY), **fields}))


def with_sgd(trainer: grpo.Trainer, lr: float) -> grpo.Trainer:
    """AdamW divides by the gradient's size, and so makes large what is zero but for rounding (the keys' biases)."""
    sgd = torch.optim.SGD(trainer.model.parameters(), lr=lr)
    return evolve(trainer, optimizer=sgd, scheduler=torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0))


def parameters_after(config: TrainConfig, sgd: bool = False) -> torch.Tensor:
    trainer = trainer_of(config)
    trainer = with_sgd(trainer, 0.1) if sgd else trainer
    for step in range(config.steps):
        grpo.train_step(trainer, step)
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@given(seed=st.integers(0, 50), count=st.integers(1, 7), size=st.integers(2, 11))
def test_every_task_is_asked_once_per_pass(seed: int, count: int, size: int) -> None:
    steps = range(size * 2)
    asked = [index for step in steps for index in grpo.prompt_indices(seed, step, count, size)]
    passes, rest = divmod(len(asked), size)
    counts = Counter(asked[: passes * size])
    assert rest == 0
    assert set(counts) == set(range(size))
    assert set(counts.values()) == {passes}


def test_the_micro_batch_size_does_not_change_what_is_learned() -> None:
    start = parameters_after(evolve(CONFIG, steps=1, strategy=evolve(STRATEGY, actor_learning_rate=0.0)))
    whole = parameters_after(with_strategy(micro_train_batch_size=8), sgd=True)
    assert (whole - start).abs().max() > 1e-3
    for micro in (1, 2, 4):
        found = parameters_after(with_strategy(micro_train_batch_size=micro), sgd=True)
        torch.testing.assert_close(found, whole, atol=1e-6, rtol=0.0)


def test_a_run_repeats_itself_and_depends_on_its_seed() -> None:
    first, again = parameters_after(CONFIG), parameters_after(CONFIG)
    assert torch.equal(first, again)
    assert not torch.equal(first, parameters_after(with_strategy(seed=7)))


def test_the_gradient_is_that_of_the_naive_formula() -> None:
    """One update by SGD equals autograd on GRPO written out for whole sequences, token mean over the batch."""
    config = with_strategy(micro_train_batch_size=2, max_norm=0.0)
    trainer = with_sgd(trainer_of(config), 1.0)
    rollout = grpo.roll_out(trainer, 0)
    rewards = torch.arange(8.0)
    advantages = torch.cat([(r - r.mean()) / (r.std() + 1e-4) for r in rewards.split(4)])  # type: ignore[no-untyped-call]
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    losses, tokens = [], 0
    for completion, advantage in zip(rollout.completions, advantages, strict=True):
        ids = torch.tensor([completion.prompt_token_ids + completion.output_token_ids])
        logits = trainer.model(input_ids=ids, use_cache=False).logits[0, len(completion.prompt_token_ids) - 1 : -1]
        drawn = torch.tensor(completion.output_token_ids)
        losses.append(-(advantage * logits.log_softmax(-1).gather(1, drawn[:, None])).sum())
        tokens += len(drawn)
    gradients = torch.autograd.grad(torch.stack(losses).sum() / tokens, list(trainer.model.parameters()))
    metrics = grpo.update(trainer, rollout, advantages)
    for (name, parameter), gradient in zip(trainer.model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter, before[name] - gradient, atol=1e-5, rtol=1e-4)
    assert metrics["rollout_gap"] < 1e-4  # the engine and the trainer agree on what was sampled


@pytest.mark.parametrize(
    "fields",
    [
        {"use_kl_loss": True, "kl_estimator": "k2"},
        {"advantage_estimator": "dr_grpo"},
        {"advantage_estimator": "reinforce_plus_plus", "advantage_clip": 1.0},
        {"reward_running_norm": True, "reward_running_norm_minus_mean": True, "reward_clip": 0.5},
        {"overlong_buffer": True, "overlong_buffer_len": 1, "advantages_norm": True},
    ],
)
def test_each_setting_of_the_trainer_runs_and_changes_something_finite(fields: dict[str, object]) -> None:
    trainer = trainer_of(with_strategy(**fields))
    metrics = [grpo.train_step(trainer, step) for step in range(2)]
    assert all(torch.isfinite(torch.tensor(list(row.values()))).all() for row in metrics)
    if fields.get("use_kl_loss"):
        assert metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics[1]["kl"] > 0.0


def test_dr_grpo_divides_by_the_most_tokens_there_could_be() -> None:
    completions = [Completion((1,), (2, 3), None, "stop"), Completion((1,), (2,), None, "stop")]
    assert grpo.loss_tokens(CONFIG, completions) == 3
    assert grpo.loss_tokens(with_strategy(advantage_estimator="dr_grpo"), completions) == 2 * CONFIG.max_new_tokens


def test_several_updates_from_one_rollout_are_clipped_against_it() -> None:
    trainer = trainer_of(evolve(CONFIG, updates_per_rollout=2))
    assert prompts_per_rollout(trainer.config) == 4
    grpo.train_step(trainer, 0)
    assert trainer.scheduler.last_epoch == 2


def test_C7_what_this_trainer_does_not_carry_out_is_refused() -> None:
    for field in ({"critic_pretrain": True}, {"remote_rm_url": "http://x"}, {"dynamic_sampling": True}):
        with pytest.raises(UnsupportedOperation, match=next(iter(field))):
            checked(with_strategy(**field))
    with pytest.raises(ConfigError, match="whole number of groups"):
        checked(with_strategy(train_batch_size=6, micro_train_batch_size=2))
    with pytest.raises(ConfigError, match="compares the samples"):
        checked(with_strategy(n_samples_per_prompt=1))
