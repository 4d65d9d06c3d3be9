"""Rewards by hand, and every way in which a user's own can go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from lightrft.errors import TaskError
from lightrft.rlvr.rewards import (
    REWARDS,
    Reward,
    additions_reward,
    exact_answer,
    number_format,
    reward_by_name,
    score,
    verifier,
    weighted,
)
from lightrft.rlvr.tasks import Task

SEVEN = Task("What is 3 + 4?", "7")


@pytest.mark.parametrize(
    ("text", "exact", "number", "additions"),
    [
        ("7", 1.0, 1.0, 1.0),
        (" 7\n", 1.0, 1.0, 1.0),
        ("8", 0.0, 1.0, 0.2),
        ("-8.5", 0.0, 1.0, 0.2),
        ("3 + 4 = 7", 0.0, 0.0, 0.0),
        ("7.", 0.0, 0.0, 0.0),
        ("07", 0.0, 1.0, 0.2),
        ("٧", 0.0, 0.0, 0.0),
        ("1\n2", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_by_hand(text: str, exact: float, number: float, additions: float) -> None:
    assert exact_answer(SEVEN, text) == exact
    assert number_format(SEVEN, text) == number
    assert additions_reward(SEVEN, text) == additions


def test_an_answer_that_is_no_number_still_earns_the_whole_reward() -> None:
    assert additions_reward(Task("q", "yes"), "yes") == 1.0


def test_weighted_is_a_sum() -> None:
    both = weighted((0.75, exact_answer), (0.25, number_format))
    assert score(both, [SEVEN] * 3, ["7", "8", "x"]) == [1.0, 0.25, 0.0]


def test_verifier() -> None:
    assert score(verifier, [Task("q", "a", lambda text: 0.5)], ["x"]) == [0.5]
    with pytest.raises(TaskError, match="no verifier"):
        score(verifier, [SEVEN], ["x"])


def test_names() -> None:
    assert reward_by_name("auto", auto="additions") is additions_reward
    assert reward_by_name("auto") is exact_answer
    assert all(reward_by_name(name, auto="exact") is reward for name, reward in REWARDS.items())


def test_ones_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lightrft_test_rewards.py").write_text("def length(task, text): return len(text)\nlimit = 3\n")
    (tmp_path / "lightrft_test_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert score(reward_by_name("lightrft_test_rewards:length"), [SEVEN], ["abc"]) == [3.0]
    for spec, said in {
        "lightrft_test_rewards:lenght": "Did you mean length",
        "lightrft_test_rewards:limit": "no function",
        "lightrft_test_broken:f": "ZeroDivisionError",
        "lightrft_test_none:f": "PYTHONPATH",
        "exakt": "Did you mean exact",
        "module:": "package.module:function",
        ":f": "package.module:function",
    }.items():
        with pytest.raises(TaskError) as caught:
            reward_by_name(spec)
        assert said in str(caught.value)
        assert spec in str(caught.value) or spec.partition(":")[2] in str(caught.value)


def failing(task: Task, text: str, /) -> float:
    raise KeyError("boom")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        (None, "returned None"),
        ("1.0", "returned '1.0'"),
        (torch.zeros(2), "no single number"),
        (1j, "no number"),
    ],
)
def test_score_names_reward_question_and_text(value: object, said: str) -> None:
    def bad_reward(task: Task, text: str, /) -> float:
        return cast(float, value) if text == "wrong" else 0.0

    with pytest.raises(TaskError) as caught:
        score(bad_reward, [SEVEN, Task("Which?", "a")], ["fine", "wrong"])
    for part in (said, "bad_reward", "Which?", "wrong"):
        assert part in str(caught.value)


def test_score_names_what_a_reward_raised_and_keeps_it_as_the_cause() -> None:
    with pytest.raises(TaskError, match=r"failing raised KeyError: 'boom'.*3 \+ 4") as caught:
        score(failing, [SEVEN], ["x" * 5000])
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(str(caught.value)) < 600


def test_weighted_names_the_part_that_failed() -> None:
    with pytest.raises(TaskError, match="failing raised") as caught:
        score(weighted((1.0, exact_answer), (1.0, failing)), [SEVEN], ["x"])
    assert "weighted" not in str(caught.value)


def test_numbers_of_every_kind_become_floats() -> None:
    for value in (True, 1, np.float32(1), np.bool_(True), torch.tensor(1)):
        reward = cast(Reward, lambda task, text, value=value: value)
        got = score(reward, [SEVEN], ["x"])
        assert got == [1.0]
        assert type(got[0]) is float


def test_score_wants_as_many_tasks_as_texts() -> None:
    with pytest.raises(ValueError, match="longer"):
        score(exact_answer, [SEVEN], ["a", "b"])


def test_ctrl_c_in_a_reward_is_no_task_error() -> None:
    def interrupted(task: Task, text: str, /) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted, [SEVEN], ["x"])
