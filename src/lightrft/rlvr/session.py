"""A whole run: everything is loaded and looked at first, then a directory is made, then the trainer runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from attrs import asdict, define, frozen

from lightrft.errors import CheckpointError, ConfigError, RankError, TaskError
from lightrft.ops.schedulers import constant_with_warmup
from lightrft.rlvr import grpo
from lightrft.rlvr.advantages import RunningMoments
from lightrft.rlvr.config import TrainConfig, as_table, checked
from lightrft.rlvr.grpo import Evaluation, RewardState, Trainer
from lightrft.rlvr.models import Tokenizer, load_policy
from lightrft.rlvr.progress import open_progress
from lightrft.rlvr.rewards import reward_by_name
from lightrft.rlvr.run_directory import (
    RunDirectory,
    Transcript,
    append_metrics,
    draw_chart,
    open_run,
    open_scalars,
    truncate_metrics,
    write_config,
    write_transcripts,
)
from lightrft.rlvr.tasks import load_tasks
from lightrft.strategy.flags import dump_toml
from lightrft.strategy.protocol import Strategy
from lightrft.strategy.strategy import as_record, get_strategy
from lightrft.wrappers import traced

if TYPE_CHECKING:
    from torch.nn import Module

T = TypeVar("T")
SHOWN_TRANSCRIPTS = 12


@frozen
class EngineArguments:
    """What an engine is told beside its name."""

    tokenizer: Tokenizer
    max_model_len: int | None


@frozen
class Outcome:
    """How a run ended."""

    rank: int
    directory: Path
    steps: int
    stopped: bool
    """It was asked to stop before its last step, and can be resumed."""
    before: float | None
    """Held-out accuracy of the untrained model; None where this part of the run did not measure it."""
    after: float | None
    """The last held-out accuracy."""


@define
class Accuracies:
    """The evaluations of this part of a run."""

    before: float | None = None
    after: float | None = None


@define
class StopRequest:
    """Whether Ctrl-C was pressed."""

    asked: bool = False


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """The first Ctrl-C asks for a stop after the current step; a second one interrupts at once."""
    request = StopRequest()
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        request.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)


def on_rank_0(strategy: Strategy, action: Callable[[], T]) -> T | None:
    """What ``action`` gives on rank 0, None on the others; they wait for it, and end with it when it fails."""
    result, failure = None, None
    if strategy.is_rank_0():
        try:
            result = action()
        except Exception as error:
            failure = error
    failed = bool(strategy.all_reduce(int(failure is not None), "max"))
    if failure is not None:
        raise failure
    if failed:
        raise RankError("rank 0 could not go on, and says why.")
    return result


def load_in_turn(strategy: Strategy, spec: str) -> tuple[Module, Tokenizer]:
    """The model on every rank. Rank 0 is first: what it converts or fetches is there for the others."""
    with strategy.init_model_context():
        loaded = on_rank_0(strategy, lambda: load_policy(spec))
        return load_policy(spec) if loaded is None else loaded


def check_world(config: TrainConfig, world_size: int) -> None:
    """Refuses a batch that cannot be dealt out to the ranks in whole groups."""
    n = config.strategy.n_samples_per_prompt
    groups = config.strategy.train_batch_size // n
    if config.strategy.train_batch_size % n or groups % world_size:
        raise ConfigError(
            f"train_batch_size={config.strategy.train_batch_size} is {config.strategy.train_batch_size / n:g} groups of "
            f"n_samples_per_prompt={n}, and {world_size} ranks cannot have as many each. Use a train_batch_size of "
            f"{max(1, round(groups / world_size)) * world_size * n}."
        )


def build_trainer(config: TrainConfig, strategy: Strategy) -> Trainer:
    """Loads tasks, reward and model; refuses what cannot work. Nothing is written."""
    if strategy.world_size > 1:
        check_world(config, strategy.world_size)
    tasks = load_tasks(config.task, held_out=config.held_out, seed=config.strategy.seed, size=config.task_size)
    reward = reward_by_name(config.reward, auto=tasks.reward)
    model, tokenizer = load_in_turn(strategy, config.model)
    reference = None
    if config.strategy.use_kl_loss:
        reference, _ = load_in_turn(strategy, config.model)
        reference.load_state_dict(model.state_dict())
        reference = strategy.prepare(reference.eval())
    optimizer = strategy.create_optimizer(
        model,
        lr=config.strategy.actor_learning_rate,
        betas=config.strategy.adam_betas,
        weight_decay=config.strategy.l2,
    )
    scheduler = constant_with_warmup(config.strategy, optimizer, config.steps * config.updates_per_rollout)
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    strategy.setup_inference_engine(
        EngineArguments(tokenizer, limit), engine_type=config.strategy.engine_type, actor=model
    )
    strategy.update_engine_weights(model)
    trainer = Trainer(
        config=config,
        strategy=strategy,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        reference=reference,
        tokenizer=tokenizer,
        tasks=tasks,
        reward=reward,
        seen=RewardState(),
    )
    check_lengths(trainer, limit)
    return trainer


def check_lengths(trainer: Trainer, limit: int | None) -> None:
    """Refuses a task whose prompt leaves the model no room for an answer, before anything is trained."""
    room = trainer.config.max_new_tokens
    for task in (*trainer.tasks.train, *trainer.tasks.held_out):
        (prompt,) = grpo.prompts(trainer, [task])
        if limit is not None and len(prompt) + room > limit:
            question = task.question if len(task.question) <= 80 else task.question[:77] + "..."
            raise TaskError(
                f"the prompt {question!r} has {len(prompt)} tokens, and with max_new_tokens={room} that is over the "
                f"model's limit of {limit}. Shorten the question, or lower max_new_tokens."
            )


def open_directory(config: TrainConfig, strategy: Strategy, *, resume: bool, overwrite: bool) -> RunDirectory:
    """The run's directory. Rank 0 makes it; the others know where it is."""

    def make() -> RunDirectory:
        directory = open_run(config.output, resume=resume, overwrite=overwrite)
        write_config(directory, dump_toml(as_table(config)))
        return directory

    return on_rank_0(strategy, make) or RunDirectory(Path(config.output))


def resume_step(trainer: Trainer, directory: RunDirectory) -> int:
    """Restores the last checkpoint of the run; returns the number of steps that it had made."""
    path, client_state = trainer.strategy.load_ckpt(
        trainer.model, directory.checkpoints, optimizer=trainer.optimizer, scheduler=trainer.scheduler
    )
    step, moments = client_state.get("step"), client_state.get("reward_moments")
    if not isinstance(step, int) or not isinstance(moments, dict):
        raise CheckpointError(f"{path}: not a checkpoint of lightrft train: its client_state has no step.")
    trainer.seen.moments = RunningMoments(**moments)
    trainer.strategy.update_engine_weights(trainer.model)
    return step


def run(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    trace: Path | None = None,
    announce: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Trains as configured and leaves everything in ``config.output``.

    ``trace``: a file for a picture of where the time goes (Perfetto, chrome://tracing), one for each rank.

    Ctrl-C ends it after the current step with a checkpoint (``Outcome.stopped``). Raises the errors of
    ``lightrft.errors``, before anything is written wherever that is possible.
    """
    checked(config)
    strategy = get_strategy(config.strategy)
    if trace is not None:
        strategy = traced(as_record(strategy), trace)
    try:
        strategy.setup_distributed()
        return _run(config, strategy, resume, overwrite, quiet, announce)
    finally:
        strategy.close()


def _run(
    config: TrainConfig,
    strategy: Strategy,
    resume: bool,
    overwrite: bool,
    quiet: bool,
    announce: Callable[[str], None],
) -> Outcome:
    if not resume:
        on_rank_0(strategy, lambda: refuse_occupied(config, overwrite))
    if strategy.is_rank_0():
        announce(f"loading the model {config.model!r} and the task {config.task!r}")
    trainer = build_trainer(config, strategy)
    directory = open_directory(config, strategy, resume=resume, overwrite=overwrite)
    start = resume_step(trainer, directory) if resume else 0
    writes = strategy.is_rank_0()
    if writes and resume:
        truncate_metrics(directory, start)
    scalars = None
    if writes and config.strategy.use_tensorboard:
        scalars = open_scalars(directory, start if resume else None)
    accuracies = Accuracies()

    def record(step: int, metrics: Mapping[str, float]) -> None:
        show(step, metrics)
        if writes:
            append_metrics(directory, step, metrics)
        if scalars is not None:
            scalars.write(step, metrics)

    def on_evaluation(step: int, evaluation: Evaluation) -> None:
        record(step, {"accuracy": evaluation.accuracy})
        accuracies.after = evaluation.accuracy
        if step == 0:
            accuracies.before = evaluation.accuracy
        if writes and step in (0, config.steps):
            title = "Before training" if step == 0 else "After training"
            write_transcripts(directory, title, transcripts(evaluation))

    def on_checkpoint(step: int) -> None:
        strategy.save_ckpt(
            trainer.model,
            directory.checkpoints,
            tag=f"step{step}",
            max_num=config.keep_checkpoints,
            client_state={"step": step, "reward_moments": asdict(trainer.seen.moments)},
            optimizer=trainer.optimizer,
            scheduler=trainer.scheduler,
        )

    progress = open_progress(config.steps, quiet, start=start) if writes else nullcontext(show_nothing)
    with stop_on_interrupt() as stop, progress as show:
        try:
            made = grpo.train(
                trainer,
                start,
                on_step=record,
                on_evaluation=on_evaluation,
                on_checkpoint=on_checkpoint,
                stop_asked=lambda: stop.asked,
            )
        finally:
            if scalars is not None:
                scalars.close()
            if writes:
                draw_chart(directory)
    return Outcome(strategy.get_rank(), directory.path, made, made < config.steps, accuracies.before, accuracies.after)


def show_nothing(step: int, metrics: Mapping[str, float], /) -> None:
    """The progress display of all ranks but one."""


def refuse_occupied(config: TrainConfig, overwrite: bool) -> None:
    """Says that the directory is taken before the model is loaded, which takes long."""
    where = Path(config.output)
    if where.exists() and not overwrite:
        open_run(where, resume=False, overwrite=False)


def transcripts(evaluation: Evaluation) -> list[Transcript]:
    """The first answers of an evaluation."""
    rows = zip(evaluation.tasks, evaluation.texts, evaluation.rewards, strict=True)
    return [Transcript(task.question, task.answer, text, reward) for task, text, reward in rows][:SHOWN_TRANSCRIPTS]
