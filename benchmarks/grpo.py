"""The GRPO loop against trl's GRPOTrainer: same model, prompts, batch, lengths and steps, each in a process of its own,
turn by turn, so that neither profits from the other's memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from attrs import asdict, evolve, frozen

from benchmarks.figures import Figure

Contender = Literal["lightrft", "trl"]
LEARNING_RATE = 1e-5


@frozen(kw_only=True)
class Job:
    """What both do."""

    model: str
    """``tiny`` or ``smollm2``."""
    prompts: int
    group: int
    new_tokens: int
    steps: int
    """The first of them warms up and is not counted."""


@frozen(kw_only=True)
class Measured:
    """What one contender took."""

    seconds_per_step: float
    completion_tokens_per_second: float
    training_tokens_per_second: float
    """Prompt and completion tokens that went through an update."""
    peak_gigabytes: float


TINY = Job(model="tiny", prompts=4, group=8, new_tokens=32, steps=12)
SMOLLM2 = Job(model="smollm2", prompts=6, group=8, new_tokens=8, steps=3)


def peak_gigabytes() -> float:
    """The most memory that this process has held."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measured(ends: list[float], completion_tokens: list[int], prompt_tokens: int) -> Measured:
    """Figures out of the times at which the steps ended, the first being the warm-up."""
    durations = [after - before for before, after in pairwise(ends)]
    median = statistics.median(durations)
    tokens = statistics.median(completion_tokens[1:])
    return Measured(
        seconds_per_step=median,
        completion_tokens_per_second=tokens / median,
        training_tokens_per_second=(tokens + prompt_tokens) / median,
        peak_gigabytes=peak_gigabytes(),
    )


def run_lightrft(job: Job) -> Measured:
    """Steps of our trainer."""
    from lightrft.rlvr import grpo
    from lightrft.rlvr.config import TrainConfig
    from lightrft.rlvr.demo import SMOLLM2 as DEMO
    from lightrft.rlvr.session import build_trainer
    from lightrft.strategy.strategy import get_strategy

    batch = job.prompts * job.group
    config = TrainConfig(
        model=job.model,
        task="additions",
        steps=job.steps,
        max_new_tokens=job.new_tokens,
        strategy=evolve(
            DEMO.strategy,
            train_batch_size=batch,
            micro_train_batch_size=batch,
            n_samples_per_prompt=job.group,
            actor_learning_rate=LEARNING_RATE,
        ),
    )
    strategy = get_strategy(config.strategy)
    strategy.setup_distributed()
    trainer = build_trainer(config, strategy)
    ends, tokens = [], []
    for step in range(job.steps):
        metrics = grpo.train_step(trainer, step)
        ends.append(time.perf_counter())
        tokens.append(round(metrics["length"] * batch))
    prompt_tokens = len(grpo.prompts(trainer, trainer.tasks.train[:1])[0]) * batch
    return measured(ends, tokens, prompt_tokens)


def run_trl(job: Job) -> Measured:
    """Steps of trl's trainer, its callbacks telling the time."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from lightrft.rlvr.models import chat_text, load_policy
    from lightrft.rlvr.rewards import additions_reward
    from lightrft.rlvr.tasks import Task, load_tasks

    trl: Any = import_module("trl")  # its types differ from ours, and it is not installed where types are checked
    model, tokenizer = load_policy(job.model)
    tasks = load_tasks("additions", held_out=1 / 3, seed=42, size=81).train
    asked = [
        {
            "prompt": chat_text(tokenizer, t.question, None) if tokenizer.chat_template else t.question,
            "answer": t.answer,
        }
        for t in tasks
    ]
    batch = job.prompts * job.group
    ends: list[float] = []
    tokens: list[int] = []

    def reward(
        completions: list[str], answer: list[str], completion_ids: list[list[int]], **rest: object
    ) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [additions_reward(Task("", right), text) for text, right in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):  # type: ignore[misc]  # trl asks for a subclass
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(asked * 10),
            processing_class=tokenizer,
            callbacks=[Clock()],
            args=trl.GRPOConfig(
                output_dir=directory,
                per_device_train_batch_size=batch,
                num_generations=job.group,
                max_completion_length=job.new_tokens,
                max_steps=job.steps,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                temperature=1.0,
                beta=0.0,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        trainer.train()
    prompt_tokens = len(tokenizer.encode(asked[0]["prompt"], add_special_tokens=False)) * batch
    return measured(ends, tokens, prompt_tokens)


def in_a_process(contender: Contender, job: Job) -> Measured:
    """One contender by itself."""
    words = [sys.executable, "-m", "benchmarks.grpo", contender, json.dumps(asdict(job))]
    result = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if result.returncode != 0:
        raise RuntimeError(f"{contender} failed:\n{result.stderr[-3000:]}")
    return Measured(**json.loads(result.stdout.strip().splitlines()[-1]))


def measure_job(job: Job, name: str, rounds: int, speed_target: float, memory_target: float | None) -> list[Figure]:
    """Turn by turn, then medians."""
    runs: dict[Contender, list[Measured]] = {"lightrft": [], "trl": []}
    for turn in range(rounds):
        order: tuple[Contender, ...] = ("lightrft", "trl") if turn % 2 == 0 else ("trl", "lightrft")
        for contender in order:
            runs[contender].append(in_a_process(contender, job))

    def median(contender: Contender, quantity: str) -> float:
        return statistics.median(cast(float, getattr(run, quantity)) for run in runs[contender])

    figures = []
    for quantity, unit in (
        ("completion_tokens_per_second", "completion tokens/s"),
        ("training_tokens_per_second", "training tokens/s"),
    ):
        ours, rival = median("lightrft", quantity), median("trl", quantity)
        figures.append(
            Figure(
                name=f"GRPO, {name}: {unit} (rival: trl)",
                ours=f"{ours:,.0f}",
                rival=f"{rival:,.0f}",
                ratio=ours / rival,
                target=f">= {speed_target}",
                met=ours / rival >= speed_target,
                note=f"{median('lightrft', 'seconds_per_step'):.2f} s a step against "
                f"{median('trl', 'seconds_per_step'):.2f} s",
            )
        )
    if memory_target is not None:
        ours, rival = median("lightrft", "peak_gigabytes"), median("trl", "peak_gigabytes")
        figures.append(
            Figure(
                name=f"GRPO, {name}: peak memory (rival: trl)",
                ours=f"{ours:.2f} GB",
                rival=f"{rival:.2f} GB",
                ratio=ours / rival,
                target=f"<= {memory_target}",
                met=ours / rival <= memory_target,
            )
        )
    return figures


def measure(rounds: int = 2) -> list[Figure]:
    """The tiny model for the overhead of the loop, SmolLM2-135M with the demo's settings for the real thing."""
    tiny = measure_job(TINY, "tiny Qwen2, 32 completions of 32 tokens, groups of 8", rounds, 1.5, None)
    real = measure_job(SMOLLM2, "SmolLM2-135M, 48 completions of 8 tokens, groups of 8", max(1, rounds - 1), 2.0, 0.6)
    return [*tiny, *real]


if __name__ == "__main__":
    which, described = sys.argv[1:]
    chosen = Job(**json.loads(described))
    print(json.dumps(asdict(run_lightrft(chosen) if which == "lightrft" else run_trl(chosen))))
