"""``StrategyConfig``: every setting of a strategy, typed, checked, and never silently ignored.

The laws C1 to C7 (docs/laws.md) say what it promises. Importing this file loads attrs and cattrs, nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias, cast

from attrs import Factory, field, frozen

from lightrft.errors import ConfigError, UnsupportedOperation, listed
from lightrft.strategy.structuring import REST, WITHIN, Within, settings, settle, structure
from lightrft.strategy.values import comparable, owned, shown

logger = logging.getLogger(__name__)

Group: TypeAlias = Literal["training", "backend", "engine", "optimizer", "rewards", "advantages", "data", "logging"]
"""The heading of a field in summaries and in the help of flags."""

Owner: TypeAlias = Literal["every backend", "backend", "engine", "trainer"]
"""Who carries a field out. ``every backend``: all of them, or ``get_strategy`` itself. ``backend``, ``engine``: those
backends that say so. ``trainer``: the program above the strategy, if it says so."""

EngineType: TypeAlias = Literal["vllm", "sglang", "hf", "scripted"]
AdvantageEstimator: TypeAlias = Literal[
    "group_norm", "dr_grpo", "reinforce_plus_plus", "reinforce", "reinforce_baseline", "rloo", "gae"
]
"""The reference trainer computes the first three; the others are names that trainers above the strategy use."""
KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
GradAccumDtype: TypeAlias = Literal["fp32", "bf16", "fp16"]

COUNT = Within(low=1)
NOT_NEGATIVE = Within(low=0)
SHARE = Within(low=0, high=1)


def about(group: Group, owner: Owner, within: Within | None = None) -> dict[str, object]:
    """The metadata of a field."""
    return {"group": group, "owner": owner, WITHIN: within}


@frozen(kw_only=True)
class StrategyConfig:
    """Every setting of a strategy. Frozen and hashable.

    The constructor and ``from_args`` take a value of another type where nothing is lost ("8" for 8, a list for a
    tuple) and raise one ``ConfigError`` that lists every other.
    """

    seed: int = field(default=42, metadata=about("training", "every backend", Within(0, 2**32 - 1)))
    """Seeds Python, numpy, torch and the engine."""
    max_norm: float = field(default=1.0, metadata=about("training", "every backend", NOT_NEGATIVE))
    """Gradients are clipped to this global 2-norm; 0: not clipped."""
    micro_train_batch_size: int = field(default=1, metadata=about("training", "every backend", COUNT))
    """Samples of one backward pass on one rank."""
    train_batch_size: int = field(default=128, metadata=about("training", "every backend", COUNT))
    """Samples of one update, over all ranks."""
    local_rank: int = field(default=-1, metadata=about("training", "every backend", Within(low=-1)))
    """This process's rank on its machine; -1: as the launcher says."""

    check_ranks: bool = field(default=False, metadata=about("training", "every backend"))
    """Ranks that disagree about the next operation raise and say so, instead of hanging; slower. Also on where the
    environment has LIGHTRFT_CHECK_RANKS=1."""

    async_save: bool = field(default=False, metadata=about("training", "every backend"))
    """Checkpoints are copied to the CPU and written while training goes on."""

    backend: str | None = field(default=None, metadata=about("backend", "every backend"))
    """fake, local, fsdp, deepspeed or an installed backend's name; none: fsdp or deepspeed, as the flag fsdp says."""
    fsdp: bool = field(default=False, metadata=about("backend", "every backend"))
    """Choose FSDP rather than DeepSpeed, where no backend is named."""
    bf16: bool = field(default=True, metadata=about("backend", "backend"))
    """Compute in bfloat16, on fp32 master weights."""
    zero_stage: int = field(default=2, metadata=about("backend", "backend", Within(0, 3)))
    """DeepSpeed: which of optimizer state (1), gradients (2) and parameters (3) are sharded; 0: nothing."""
    fsdp_cpu_offload: bool = field(default=False, metadata=about("backend", "backend"))
    """FSDP: keep parameters, gradients and optimizer state in CPU memory."""
    adam_offload: bool = field(default=False, metadata=about("backend", "backend"))
    """Keep the optimizer state in CPU memory."""
    zpg: int = field(default=1, metadata=about("backend", "backend", COUNT))
    """DeepSpeed: ranks of a group that holds its own secondary copy of the parameters (ZeRO++); 1: none."""
    grad_accum_dtype: GradAccumDtype | None = field(default=None, metadata=about("backend", "backend"))
    """Precision in which gradients are accumulated; none: the backend's own."""
    overlap_comm: bool = field(default=False, metadata=about("backend", "backend"))
    """Reduce gradients while the backward pass goes on."""
    sp_size: int = field(default=1, metadata=about("backend", "backend", COUNT))
    """Ranks that share one sequence (sequence parallelism)."""

    engine_type: EngineType = field(default="vllm", metadata=about("engine", "every backend"))
    """The inference engine that generates rollouts."""
    engine_tp_size: int = field(default=1, metadata=about("engine", "engine", COUNT))
    """Ranks that share one copy of the engine's model (tensor parallelism)."""
    enable_engine_sleep: bool = field(default=False, metadata=about("engine", "engine"))
    """The engine gives its memory back while the model trains."""
    engine_mem_util: float = field(default=0.5, metadata=about("engine", "engine", Within(0, 1, low_open=True)))
    """Share of the device's memory that the engine may use."""
    weight_sync_bucket_mb: int = field(default=256, metadata=about("engine", "engine", COUNT))
    """Weights go to the engine in pieces of at most this many megabytes (10**6 bytes)."""
    verify_weight_sync: bool = field(default=False, metadata=about("engine", "every backend"))
    """After each update, compare the engine's log-probabilities of a probe with the trainer's, and raise if they drift."""

    actor_learning_rate: float = field(default=1e-5, metadata=about("optimizer", "trainer", NOT_NEGATIVE))
    """AdamW's learning rate of the policy."""
    critic_learning_rate: float = field(default=1e-5, metadata=about("optimizer", "trainer", NOT_NEGATIVE))
    """AdamW's learning rate of the critic."""
    adam_betas: tuple[float, float] = field(
        default=(0.9, 0.95), metadata=about("optimizer", "trainer", Within(0, 1, high_open=True))
    )
    """AdamW's decay rates of the first and the second moment."""
    l2: float = field(default=0.0, metadata=about("optimizer", "trainer", NOT_NEGATIVE))
    """AdamW's weight decay."""
    lr_warmup_ratio: float = field(default=0.03, metadata=about("optimizer", "trainer", SHARE))
    """Share of all updates in which the learning rate rises to its full value."""
    critic_pretrain: bool = field(default=False, metadata=about("optimizer", "trainer"))
    """Train the critic alone before the policy."""
    fused_linear_logprob: bool = field(default=False, metadata=about("optimizer", "trainer"))
    """Compute log-probabilities without holding all logits at once."""
    use_mp_opt: bool = field(default=False, metadata=about("optimizer", "trainer"))
    """Optimizer with state of mixed precision."""

    remote_rm_url: str | None = field(default=None, metadata=about("rewards", "trainer"))
    """Address of a reward model's server."""
    reward_running_norm: bool = field(default=False, metadata=about("rewards", "trainer"))
    """Divide rewards by their running standard deviation."""
    reward_running_norm_minus_mean: bool = field(default=False, metadata=about("rewards", "trainer"))
    """Subtract the running mean first."""
    reward_clip: float = field(default=0.0, metadata=about("rewards", "trainer", NOT_NEGATIVE))
    """Rewards are clipped to plus or minus this; 0: not clipped."""
    overlong_buffer: bool = field(default=False, metadata=about("rewards", "trainer"))
    """Take reward from completions that come close to the length limit (DAPO, section 3.4)."""
    overlong_buffer_len: int = field(default=1024, metadata=about("rewards", "trainer", NOT_NEGATIVE))
    """Tokens before the limit at which the penalty begins."""
    overlong_buffer_penalty_factor: float = field(default=1.0, metadata=about("rewards", "trainer", NOT_NEGATIVE))
    """The penalty at the limit."""

    advantage_estimator: AdvantageEstimator = field(default="group_norm", metadata=about("advantages", "trainer"))
    """How advantages are made from rewards."""
    advantages_norm: bool = field(default=False, metadata=about("advantages", "trainer"))
    """Normalise advantages over the batch."""
    advantage_clip: float = field(default=0.0, metadata=about("advantages", "trainer", NOT_NEGATIVE))
    """Advantages are clipped to plus or minus this; 0: not clipped."""
    use_kl_loss: bool = field(default=False, metadata=about("advantages", "trainer"))
    """Add the KL divergence from the initial model to the loss."""
    kl_estimator: KLEstimator = field(default="k3", metadata=about("advantages", "trainer"))
    """How that divergence is estimated from samples (Schulman, Approximating KL Divergence, 2020)."""

    micro_rollout_batch_size: int = field(default=2, metadata=about("data", "trainer", COUNT))
    """Prompts of one forward pass while rollouts are scored."""
    n_samples_per_prompt: int = field(default=8, metadata=about("data", "trainer", COUNT))
    """Completions of one prompt: the group that is compared."""
    dynamic_sampling: bool = field(default=False, metadata=about("data", "trainer"))
    """Leave out prompts whose completions all have the same reward (DAPO, section 3.2)."""
    pretrain_data: str | None = field(default=None, metadata=about("data", "trainer"))
    """Text that is trained on beside the rollouts."""
    mixed_mm_data: bool = field(default=False, metadata=about("data", "trainer"))
    """Batches hold prompts with and without images."""

    plot_every: int = field(default=-1, metadata=about("logging", "trainer", Within(low=-1)))
    """Steps between length statistics and plots; -1 and 0: never."""
    use_tensorboard: bool = field(default=False, metadata=about("logging", "trainer"))
    """Write TensorBoard files."""
    log_dir: str | None = field(default=None, metadata=about("logging", "every backend"))
    """Directory of TensorBoard files and plots."""

    _extra_args: Mapping[str, object] = field(
        default=Factory(lambda self: {}, takes_self=True),  # with takes_self tyro makes no flag of it
        alias="extra_args",
        eq=comparable,
        metadata={REST: True},
    )
    """What was given under names that are no field."""

    def __attrs_post_init__(self) -> None:
        settle(self)

    @classmethod
    def from_args(cls, args: object) -> StrategyConfig:
        """The configuration in a Namespace, a mapping, any object with attributes, or a StrategyConfig (C1).

        Names that are no field go to ``extra_args``; those that look misspelt are warned about, once (C3). Raises
        ``ConfigError`` with every value that cannot be used.
        """
        return structure(cls, args)

    @property
    def extra_args(self) -> Mapping[str, object]:
        """What was given under names that are no field: a copy, so that the configuration stays as it is."""
        return cast("Mapping[str, object]", owned(self._extra_args))

    def get_extra_arg(self, name: str, default: object = None) -> object:
        """One of ``extra_args``, or ``default``."""
        return owned(self._extra_args[name]) if name in self._extra_args else default

    def print_config_summary(self, rank: int = 0) -> None:
        """Logs :func:`config_summary`, on rank 0 only (C6)."""
        if rank == 0:
            logger.info(config_summary(self))


DEFAULTS: Mapping[str, object] = {
    name: f.default for name, f in settings(StrategyConfig).items() if not f.metadata.get(REST)
}
"""Every field but ``extra_args``, with its default."""


def group_of(name: str) -> Group:
    """The heading of a field."""
    return cast(Group, settings(StrategyConfig)[name].metadata["group"])


def owner_of(name: str) -> Owner:
    """Who carries a field out."""
    return cast(Owner, settings(StrategyConfig)[name].metadata["owner"])


def overridden(config: StrategyConfig) -> dict[str, object]:
    """The fields, ``extra_args`` apart, that are not at their defaults."""
    return {name: value for name in DEFAULTS if (value := getattr(config, name)) != DEFAULTS[name]}


def to_dict(config: StrategyConfig) -> dict[str, object]:
    """Every field by name, ``extra_args`` as a mapping of its own; shares nothing with the configuration."""
    return {**{name: getattr(config, name) for name in DEFAULTS}, "extra_args": config.extra_args}


def from_dict(values: Mapping[str, object]) -> StrategyConfig:
    """The inverse of :func:`to_dict`, also after JSON or TOML (C4)."""
    return StrategyConfig.from_args(values)


def config_summary(config: StrategyConfig) -> str:
    """Every field under its group's heading; what was overridden is marked and shows its default (C6)."""
    changed = overridden(config)
    width = max(map(len, [*DEFAULTS, *config.extra_args]))
    lines = [f"configuration: {len(changed)} overridden (*)" if changed else "configuration: all defaults"]
    heading = ""
    for name in DEFAULTS:
        if group_of(name) != heading:
            heading = group_of(name)
            lines.append(f"  {heading}")
        mark, default = ("*", f"  (default {DEFAULTS[name]!r})") if name in changed else (" ", "")
        lines.append(f"  {mark} {name:<{width}}  {shown(getattr(config, name))}{default}")
    if config.extra_args:
        lines.append("  extra_args")
        lines += [f"  * {name:<{width}}  {shown(value)}" for name, value in config.extra_args.items()]
    return "\n".join(lines)


def accumulated_gradient(config: StrategyConfig, world_size: int) -> int:
    """A = train_batch_size / (micro_train_batch_size * world_size): micro-batches of one update, on each rank.

    Raises ``ConfigError`` if that is no whole number (C5).
    """
    batch, micro = config.train_batch_size, config.micro_train_batch_size
    unit = micro * world_size
    if batch % unit:
        below = batch // unit * unit
        nearest_fit = below if below and batch - below <= unit // 2 else below + unit
        raise ConfigError(
            f"train_batch_size={batch} is no multiple of micro_train_batch_size={micro} * world_size={world_size} "
            f"= {unit}. The nearest train_batch_size that fits is {nearest_fit}."
        )
    return batch // unit


def refuse_ignored(
    config: StrategyConfig,
    carrier: str,
    carried: Collection[str],
    owner: Literal["backend", "trainer"] = "backend",
) -> None:
    """Raises ``UnsupportedOperation`` if a field is set that its owner does not carry out (C7).

    ``carrier``: the name of the backend, or of the trainer. ``carried``: those of the owner's fields that it carries
    out; a backend answers for the engine's fields as well. Only values other than the default are refused.
    """
    owners = ("backend", "engine") if owner == "backend" else ("trainer",)
    ignored = [
        f"{name}={value!r} (the default is {DEFAULTS[name]!r})"
        for name, value in overridden(config).items()
        if owner_of(name) in owners and name not in carried
    ]
    if ignored:
        who = f"backend {carrier!r}" if owner == "backend" else carrier
        raise UnsupportedOperation(
            f"{who} does not carry out:{listed(ignored)}\nLeave them at their defaults, or choose a {owner} that does."
        )
