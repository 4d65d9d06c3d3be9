"""Rewards: plain functions of a task and a completion's text. Any function of that shape is one."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, SupportsFloat, cast

from lightrft.errors import TaskError
from lightrft.rlvr.tasks import Task, nearest

NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
SHOWN_CHARACTERS = 200


class Reward(Protocol):
    """Judges ``text``, a completion without special tokens, as an answer to ``task``. 1.0 means exactly right."""

    def __call__(self, task: Task, text: str, /) -> float: ...


def exact_answer(task: Task, text: str, /) -> float:
    """1.0 where the text, stripped of white space, is the answer; else 0.0."""
    return float(text.strip() == task.answer.strip())


def number_format(task: Task, text: str, /) -> float:
    """1.0 where the text is a number and nothing else, right or wrong."""
    return float(NUMBER.fullmatch(text.strip()) is not None)


def additions_reward(task: Task, text: str, /) -> float:
    """1.0 for the answer, 0.2 for another bare number, 0.0 for anything else.

    The small reward is a way in: a model that answers in sentences meets it long before the large one.
    """
    return max(exact_answer(task, text), 0.2 * number_format(task, text))


def verifier(task: Task, text: str, /) -> float:
    """What the task's own verifier says."""
    if task.score is None:
        raise TaskError(f"the task {task.question!r} has no verifier of its own. Use the reward 'exact'.")
    return task.score(text)


def weighted(*parts: tuple[float, Reward]) -> Reward:
    """The sum of rewards, each times its weight. An error names the part that failed."""

    def weighted_sum(task: Task, text: str, /) -> float:
        return sum(weight * score_one(reward, task, text) for weight, reward in parts)

    return weighted_sum


REWARDS: Mapping[str, Reward] = MappingProxyType(
    {"exact": exact_answer, "number": number_format, "additions": additions_reward, "verifier": verifier}
)
"""The rewards that have a short name."""


def reward_by_name(spec: str, auto: str = "exact") -> Reward:
    """The reward that ``spec`` names: one of ``REWARDS``, ``auto``, or ``package.module:function`` of one's own.

    ``auto`` stands for the reward of that name: pass ``TaskSet.reward``. Raises ``TaskError``.
    """
    name = auto if spec == "auto" else spec
    if name in REWARDS:
        return REWARDS[name]
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise TaskError(f"unknown reward {name!r}. {nearest(name, REWARDS)} Or use package.module:function.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # it is the user's module that runs here
        raise TaskError(
            f"cannot import {module_name!r} for the reward {name!r}: {type(error).__name__}: {error}. "
            "If it is a file of yours, put its directory on PYTHONPATH."
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise TaskError(f"{module_name!r} has no {function_name!r} for the reward. {nearest(function_name, public)}")
    if not callable(function):
        raise TaskError(f"the reward {name!r} is {function!r}, which is no function of (task, text).")
    return cast(Reward, function)


def reward_name(reward: Reward) -> str:
    """How messages call it."""
    name = getattr(reward, "__qualname__", None) or repr(reward)
    return f"{getattr(reward, '__module__', '?')}:{name}"


def score_one(reward: Reward, task: Task, text: str) -> float:
    """The reward as a finite float. Raises ``TaskError`` naming reward, question and text."""

    def refusal(what: str) -> TaskError:
        shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
        return TaskError(
            f"the reward {reward_name(reward)} {what}, for the question {task.question!r} and the completion "
            f"{shown!r}. A reward must be a finite number for any text."
        )

    try:
        value: object = reward(task, text)
    except TaskError:
        raise  # names its culprit already
    except Exception as error:  # it is the user's function that runs here
        raise refusal(f"raised {type(error).__name__}: {error}") from error
    if not isinstance(value, SupportsFloat):
        raise refusal(f"returned {value!r}, which is no number")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise refusal(f"returned {value!r}, which is no single number") from error
    if not math.isfinite(number):
        raise refusal(f"returned {number}")
    return number


def score(reward: Reward, tasks: Sequence[Task], texts: Sequence[str]) -> list[float]:
    """The reward of each completion: ``texts[i]`` answers ``tasks[i]``. Raises ``TaskError``."""
    return [score_one(reward, task, text) for task, text in zip(tasks, texts, strict=True)]
