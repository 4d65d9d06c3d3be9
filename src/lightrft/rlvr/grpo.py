"""The reference trainer: group-relative policy optimisation (GRPO, Shao et al., arXiv:2402.03300, section 4), on the
``Strategy`` Protocol alone.

One step: prompts -> completions -> rewards -> advantages -> one or more updates. Whatever step s needs at random comes
from the seed and s, so that a run that is stopped and resumed goes on with the numbers that it would have had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from attrs import define, frozen
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.engines.protocol import Completion, Sampling
from lightrft.ops.collectives import token_mean_scale, weighted_mean
from lightrft.ops.seeds import derived_seed
from lightrft.rlvr.advantages import RunningMoments, advantages_of, clip_to, overlong_penalty, updated_moments
from lightrft.rlvr.config import TrainConfig, prompts_per_rollout
from lightrft.rlvr.losses import kl, policy_loss
from lightrft.rlvr.models import Tokenizer, decode, encode_prompt
from lightrft.rlvr.policy import completion_batch, completion_logprobs
from lightrft.rlvr.rewards import Reward, score
from lightrft.rlvr.tasks import Task, TaskSet
from lightrft.strategy.protocol import Strategy

# Shape suffixes: G groups (prompts), n samples of each, B = G * n completions, T longest completion.


@define
class RewardState:
    """The one thing that the trainer itself remembers from step to step."""

    moments: RunningMoments = RunningMoments()


@frozen(kw_only=True)
class Trainer:
    """What a run is made of. What changes in it: parameters, optimizer, schedule, and ``seen``."""

    config: TrainConfig
    strategy: Strategy
    model: Module
    optimizer: Optimizer
    scheduler: LRScheduler
    reference: Module | None
    """The model as it was before training, for the KL penalty; None without one."""
    tokenizer: Tokenizer
    tasks: TaskSet
    reward: Reward
    seen: RewardState


@frozen
class Rollout:
    """Completions of this rank's prompts, n of each prompt adjacent, and what they earned."""

    tasks: Sequence[Task]
    completions: Sequence[Completion]
    texts: Sequence[str]
    rewards: Sequence[float]


@frozen
class Evaluation:
    """Greedy answers to held-out tasks. ``accuracy`` is the share that is exactly right."""

    accuracy: float
    tasks: Sequence[Task]
    texts: Sequence[str]
    rewards: Sequence[float]


def prompt_indices(seed: int, step: int, count: int, size: int) -> list[int]:
    """Which tasks step ``step`` trains on: permutation after permutation of all ``size`` of them, ``count`` a step."""
    chosen: list[int] = []
    for position in range(step * count, (step + 1) * count):
        epoch, offset = divmod(position, size)
        generator = torch.Generator().manual_seed(derived_seed(seed, 3, epoch))
        chosen.append(int(torch.randperm(size, generator=generator)[offset]))
    return chosen


def share_of_rank(strategy: Strategy, items: Sequence[Task]) -> Sequence[Task]:
    """This rank's consecutive part of what all ranks work on."""
    rank, world_size = strategy.get_rank(), strategy.world_size
    return items[rank * len(items) // world_size : (rank + 1) * len(items) // world_size]


def prompts(trainer: Trainer, tasks: Sequence[Task]) -> list[list[int]]:
    """The tasks as token ids."""
    return [encode_prompt(trainer.tokenizer, task.question, trainer.config.system_prompt) for task in tasks]


def roll_out(trainer: Trainer, step: int) -> Rollout:
    """Samples and scores the completions of one step: those of one update after those of another, so that each update
    sees the same ones whatever the number of ranks."""
    config, strategy = trainer.config, trainer.strategy
    n = strategy.config.n_samples_per_prompt
    train = trainer.tasks.train
    indices = prompt_indices(strategy.seed, step, prompts_per_rollout(config), len(train))
    per_update = len(indices) // config.updates_per_rollout
    asked: list[Task] = []
    completions: list[Completion] = []
    for update in range(config.updates_per_rollout):
        chosen = indices[update * per_update : (update + 1) * per_update]
        tasks = share_of_rank(strategy, [train[index] for index in chosen])
        sampling = Sampling(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            n=n,
            seed=derived_seed(strategy.seed, 4, step, update) % 2**31,
        )
        completions += strategy.gather_and_generate(sampling, all_prompt_token_ids=prompts(trainer, tasks))
        asked += [task for task in tasks for _ in range(n)]
    texts = [decode(trainer.tokenizer, completion.output_token_ids) for completion in completions]
    return Rollout(asked, completions, texts, score(trainer.reward, asked, texts))


def evaluate(trainer: Trainer) -> Evaluation:
    """Greedy answers to the held-out tasks, the same ones each time. Every rank answers its share."""
    config, strategy = trainer.config, trainer.strategy
    tasks = share_of_rank(strategy, list(trainer.tasks.held_out[: config.eval_limit]))
    sampling = Sampling(max_new_tokens=config.max_new_tokens, temperature=0.0, logprobs=False)
    completions = strategy.gather_and_generate(sampling, all_prompt_token_ids=prompts(trainer, tasks))
    texts = [decode(trainer.tokenizer, completion.output_token_ids) for completion in completions]
    rewards = score(trainer.reward, tasks, texts)
    correct = sum(reward >= 1.0 for reward in rewards)
    return Evaluation(weighted_mean(strategy, correct, len(tasks)), tasks, texts, rewards)


def micro_batches(rollout: Rollout, advantages_B: Tensor, size: int) -> Iterator[tuple[Sequence[Completion], Tensor]]:
    """Consecutive parts: completions of one prompt stay together as far as ``size`` allows."""
    for start in range(0, len(rollout.completions), size):
        yield rollout.completions[start : start + size], advantages_B[start : start + size]


def update(trainer: Trainer, rollout: Rollout, advantages_B: Tensor) -> dict[str, float]:
    """One update per window of A micro-batches; returns this step's training metrics, averaged over the updates."""
    strategy, config = trainer.strategy, trainer.config
    micro, window = strategy.micro_train_batch_size, strategy.micro_train_batch_size * strategy.accumulated_gradient
    trainer.model.train()
    totals: dict[str, float] = {}
    for start in range(0, len(rollout.completions), window):
        part = Rollout(
            rollout.tasks[start : start + window],
            rollout.completions[start : start + window],
            rollout.texts[start : start + window],
            rollout.rewards[start : start + window],
        )
        scale = token_mean_scale(strategy, loss_tokens(config, part.completions))
        for completions, advantages in micro_batches(part, advantages_B[start : start + window], micro):
            loss, sums = micro_batch_loss(trainer, completions, advantages)
            strategy.backward(loss * scale, trainer.model, trainer.optimizer)
            outcome = strategy.optimizer_step(trainer.optimizer, trainer.model, trainer.scheduler, name="actor")
            sums |= {"grad_norm": outcome.grad_norm or 0.0, "skipped": float(outcome.skipped_nonfinite)}
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
    tokens = totals.pop("tokens")
    updates = config.updates_per_rollout
    per_update = {"grad_norm": totals.pop("grad_norm") / updates, "skipped": totals.pop("skipped")}
    return per_update | {name: weighted_mean(strategy, total, tokens) for name, total in totals.items()}


def loss_tokens(config: TrainConfig, completions: Sequence[Completion]) -> int:
    """What the summed loss of these completions is divided by.

    Their tokens; for Dr. GRPO the most that they could have had, so that a long answer weighs no less per token
    (Liu et al., arXiv:2503.20783, section 3.2).
    """
    if config.strategy.advantage_estimator == "dr_grpo":
        return len(completions) * config.max_new_tokens
    return sum(len(completion.output_token_ids) for completion in completions)


def micro_batch_loss(
    trainer: Trainer, completions: Sequence[Completion], advantages_B: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The loss summed over the tokens of a micro-batch, and the sums of what is logged per token."""
    config, strategy = trainer.config, trainer.strategy
    batch = completion_batch(completions, strategy.device)
    logprobs_BT = completion_logprobs(trainer.model, batch, config.temperature)
    mask_BT = batch.output_mask_BT.bool()
    sampled_BT = sampling_logprobs(completions, logprobs_BT)
    # With one update per rollout the policy that samples is the one that learns: the ratio is 1 to the last bit.
    old_BT = logprobs_BT.detach() if config.updates_per_rollout == 1 else sampled_BT
    policy = policy_loss(
        logprobs_BT,
        old_BT,
        advantages_B.to(strategy.device).unsqueeze(1).expand_as(logprobs_BT),
        mask_BT,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    loss = policy.loss_sum
    gap_BT = (logprobs_BT.detach() - sampled_BT).abs() * mask_BT
    sums = {
        "loss": float(policy.loss_sum.detach()),
        "clip_fraction": float(policy.clip_fraction) * float(mask_BT.sum()),
        "rollout_gap": float(gap_BT.sum()),
        "entropy_estimate": float((-logprobs_BT.detach() * mask_BT).sum()),
        "tokens": float(mask_BT.sum()),
    }
    if trainer.reference is not None:
        with torch.no_grad():
            reference_BT = completion_logprobs(trainer.reference, batch, config.temperature)
        kl_BT = kl(logprobs_BT, reference_BT, strategy.config.kl_estimator) * mask_BT
        loss = loss + config.kl_coefficient * kl_BT.sum()
        sums["kl"] = float(kl_BT.detach().sum())
    return loss, sums


def sampling_logprobs(completions: Sequence[Completion], like_BT: Tensor) -> Tensor:
    """The log-probabilities with which the engine drew the tokens; zeros at padding."""
    sampled_BT = torch.zeros_like(like_BT)
    for row, completion in enumerate(completions):
        if completion.logprobs is not None:
            sampled_BT[row, : len(completion.logprobs)] = torch.tensor(completion.logprobs, device=like_BT.device)
    return sampled_BT


def rollout_metrics(trainer: Trainer, rollout: Rollout) -> dict[str, float]:
    """What the completions were like, over all ranks."""
    strategy, count = trainer.strategy, len(rollout.completions)
    lengths = [len(completion.output_token_ids) for completion in rollout.completions]
    cut_short = sum(completion.finish_reason == "length" for completion in rollout.completions)
    return {
        "reward": weighted_mean(strategy, sum(rollout.rewards), count),
        "exact": weighted_mean(strategy, sum(reward >= 1.0 for reward in rollout.rewards), count),
        "length": weighted_mean(strategy, sum(lengths), count),
        "truncated": weighted_mean(strategy, cut_short, count),
        "completion_tokens": strategy.all_reduce(float(sum(lengths)), "sum"),
    }


def rollout_advantages(trainer: Trainer, rollout: Rollout) -> Tensor:
    """The advantage of each of this rank's completions, float32 [B].

    Computed from the rewards of all ranks: an estimator that looks at the whole batch means the same at any world size.
    """
    config, strategy = trainer.strategy.config, trainer.strategy
    rewards_B = torch.tensor(rollout.rewards, dtype=torch.float32)
    if config.overlong_buffer:
        rewards_B = rewards_B + overlong_penalty(
            torch.tensor([len(completion.output_token_ids) for completion in rollout.completions]),
            max_len=trainer.config.max_new_tokens,
            buffer_len=config.overlong_buffer_len,
            factor=config.overlong_buffer_penalty_factor,
        )
    of_ranks = strategy.all_gather(rewards_B)
    rewards_Gn = torch.cat(of_ranks).view(-1, config.n_samples_per_prompt)
    if config.reward_running_norm:
        trainer.seen.moments = updated_moments(trainer.seen.moments, clip_to(rewards_Gn, config.reward_clip))
    advantages_B = advantages_of(rewards_Gn, config, trainer.seen.moments).view(-1)
    before = sum(len(rewards) for rewards in of_ranks[: strategy.get_rank()])
    return advantages_B[before : before + len(rewards_B)]


def train_step(trainer: Trainer, step: int) -> dict[str, float]:
    """One rollout and its updates; returns the step's metrics, equal on all ranks."""
    begin = time.perf_counter()
    rollout = roll_out(trainer, step)
    generated = time.perf_counter()
    metrics = rollout_metrics(trainer, rollout)
    metrics |= update(trainer, rollout, rollout_advantages(trainer, rollout))
    trainer.strategy.update_engine_weights(trainer.model)
    done = time.perf_counter()
    tokens = metrics.pop("completion_tokens")
    return metrics | {
        "learning_rate": float(trainer.scheduler.get_last_lr()[0]),
        "seconds": done - begin,
        "rollout_seconds": generated - begin,
        "tokens_per_second": tokens / (done - begin),
        "rollout_tokens_per_second": tokens / (generated - begin),
    }


def train(
    trainer: Trainer,
    start: int = 0,
    *,
    on_step: Callable[[int, Mapping[str, float]], None],
    on_evaluation: Callable[[int, Evaluation], None],
    on_checkpoint: Callable[[int], None],
    stop_asked: Callable[[], bool] = lambda: False,
) -> int:
    """Steps ``start`` to ``config.steps``, with an evaluation before, during and after.

    Calls ``on_step(step, metrics)`` after each step, ``on_evaluation(step, evaluation)`` with the number of steps made so
    far, and ``on_checkpoint(step)`` when the state should be saved: every ``save_every`` steps, at the end, and when
    ``stop_asked`` says so, which is looked at between steps. Returns the number of steps made.
    """
    config = trainer.config
    if start == 0:
        on_evaluation(0, evaluate(trainer))
    for step in range(start, config.steps):
        on_step(step + 1, train_step(trainer, step))
        made, last = step + 1, step + 1 == config.steps
        stopping = bool(trainer.strategy.all_reduce(int(stop_asked()), "max"))
        if last or (config.eval_every and made % config.eval_every == 0):
            on_evaluation(made, evaluate(trainer))
        if last or stopping or (config.save_every and made % config.save_every == 0):
            on_checkpoint(made)
        if stopping:
            return made
    return max(start, config.steps)
