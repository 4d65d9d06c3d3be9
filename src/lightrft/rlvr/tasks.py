"""Questions with answers that can be checked: where they come from, and which of them are kept for evaluation."""

from __future__ import annotations

import difflib
import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl

from attrs import field, frozen

from lightrft.errors import TaskError, listed, missing

logger = logging.getLogger(__name__)

REASONING_GYM = "reasoning-gym:"
SHOWN_PROBLEMS = 5
"""Bad lines of a file that one error shows."""


class Verifier(Protocol):
    """Scores a completion where several answers may be right: 1.0 is right, 0.0 wrong."""

    def __call__(self, text: str, /) -> float: ...


@frozen
class Task:
    """One question and its right answer. ``score``, where the source has a verifier, judges in place of equality."""

    question: str
    answer: str
    score: Verifier | None = field(default=None, eq=False, repr=False)


@frozen
class TaskSet:
    """Tasks to train on and tasks to evaluate on; no question is in both. ``reward`` names the one that fits them."""

    name: str
    train: Sequence[Task] = field(repr=False)
    held_out: Sequence[Task] = field(repr=False)
    reward: str = "exact"


def split(tasks: Sequence[Task], held_out: float, seed: int) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks, in their first order. The same seed makes the same split.

    It is distinct questions that are drawn: one that occurs twice is never on both sides. At least one is on each.
    """
    if not 0.0 < held_out < 1.0:
        raise TaskError(f"held_out={held_out} is no share of the tasks. Use a number between 0 and 1, say 0.1.")
    questions = list(dict.fromkeys(task.question for task in tasks))
    if len(questions) < 2:
        raise TaskError(
            f"{len(questions)} distinct question(s) cannot be split into training and held-out tasks. Add some."
        )
    count = min(len(questions) - 1, max(1, round(held_out * len(questions))))
    kept = set(random.Random(seed).sample(questions, count))
    return [t for t in tasks if t.question not in kept], [t for t in tasks if t.question in kept]


def additions() -> list[Task]:
    """The demo's 81 sums of two digits from 1 to 9."""
    return [
        Task(f"What is {a} + {b}? Answer with only the number.", str(a + b)) for a in range(1, 10) for b in range(1, 10)
    ]


def copying() -> list[Task]:
    """A toy for a random model: the first of two digits, ``47=`` -> ``4``. Held-out pairs hold digits seen before."""
    return [Task(f"{a}{b}=", str(a)) for a in range(10) for b in range(10)]


def read_line(raw: bytes) -> Task:
    """One line of JSONL. Raises ``ValueError`` with what is wrong with it."""
    record = json.loads(raw.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with 'question' and 'answer', found {type(record).__name__}")
    for key in ("question", "answer"):
        if key not in record:
            raise ValueError(f"no key {key!r}; found {sorted(map(str, record))}")
        value = record[key]
        if not isinstance(value, str):
            raise ValueError(f"{key!r} is {json.dumps(value)[:80]}, which is no string: put it in quotes")
        if not value.strip():
            raise ValueError(f"{key!r} is empty")
    return Task(record["question"], record["answer"])


def read_jsonl(path: Path) -> list[Task]:
    """Tasks from lines of ``{"question": "...", "answer": "..."}``, UTF-8; blank lines and other keys are passed over.

    Raises ``TaskError`` naming the file and every bad line by its number.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise TaskError(f"cannot read the task file {str(path)!r}: {error.strerror or error}.") from error
    tasks, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(read_line(line))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are among them
            problems.append(f"line {number}: {error}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = problems[:SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise TaskError(f'{path}: each line must be {{"question": "...", "answer": "..."}}.{listed(shown)}')
    if not tasks:
        raise TaskError(f"the task file {str(path)!r} holds no task. Write one JSON object a line.")
    return tasks


def option_value(text: str) -> object:
    """A dataset's option from its text: JSON where it is JSON (numbers, true, lists), else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(close)}?" if close else f"There are: {', '.join(names)}."


def reasoning_gym_tasks(name: str, options: Mapping[str, object], *, seed: int, size: int) -> list[Task]:
    """``size`` tasks of a reasoning-gym dataset, each with the dataset's own verifier.

    ``options`` are fields of the dataset's configuration; ``seed`` and ``size`` among them win. Raises ``TaskError``
    for an unknown name or an option that the dataset refuses.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise missing("reasoning-gym", "train", f"the task {REASONING_GYM}{name}") from error
    if name not in DATASETS:
        raise TaskError(f"reasoning-gym has no dataset {name!r}. {nearest(name, DATASETS)}")
    try:
        dataset = reasoning_gym.create_dataset(name, **{"seed": seed, "size": size, **options})
        entries = list(dataset)
    except Exception as error:  # each dataset refuses its options in its own way
        raise TaskError(f"the reasoning-gym dataset {name!r} refused the options {dict(options)}: {error}") from error

    def task(entry: dict[str, object]) -> Task:
        def verify(text: str, /) -> float:
            try:
                return float(dataset.score_answer(answer=text.strip(), entry=entry))
            except Exception as error:  # some verifiers parse the answer and raise where it is nonsense
                logger.debug("the verifier of %s refused %r: %s", name, text, error)
                return 0.0

        answer = entry["answer"]
        return Task(str(entry["question"]), "" if answer is None else str(answer), verify)

    return [task(entry) for entry in entries]


def tasks_of(spec: str, *, seed: int, size: int) -> tuple[list[Task], str]:
    """All tasks that ``spec`` names, and the name of the reward that fits them."""
    if spec == "additions":
        return additions(), "additions"
    if spec == "copy":
        return copying(), "additions"
    if spec.startswith(REASONING_GYM):
        name, _, query = spec.removeprefix(REASONING_GYM).partition("?")
        options = {key: option_value(value) for key, value in parse_qsl(query, keep_blank_values=True)}
        return reasoning_gym_tasks(name, options, seed=seed, size=size), "verifier"
    path = Path(spec)
    if path.exists() or path.suffix in (".jsonl", ".json"):
        return read_jsonl(path), "exact"
    raise TaskError(
        f"unknown task {spec!r}, and no file of that name. Use additions, copy, a path to a .jsonl file, or "
        f"{REASONING_GYM}NAME?option=value&..."
    )


def load_tasks(spec: str, *, held_out: float, seed: int, size: int) -> TaskSet:
    """The tasks that ``spec`` names, split by ``seed``.

    ``spec`` is one of
      - ``additions``: the demo's 81 one-digit sums;
      - ``copy``: a toy that a random model can learn;
      - ``path/to/file.jsonl``: lines of ``{"question": "...", "answer": "..."}``;
      - ``reasoning-gym:NAME`` or ``reasoning-gym:NAME?option=value&...``: ``size`` tasks of that dataset, made
        from ``seed``.

    ``held_out`` is the share of distinct questions kept for evaluation. Raises ``TaskError``.
    """
    tasks, reward = tasks_of(spec, seed=seed, size=size)
    train, kept = split(tasks, held_out, seed)
    return TaskSet(spec, tuple(train), tuple(kept), reward)
