"""Where tasks come from, and that evaluation never sees what training saw."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.errors import MissingDependency, TaskError
from lightrft.rlvr.tasks import Task, additions, load_tasks, split


def load(spec: str | Path, seed: int = 42, held_out: float = 1 / 3, size: int = 20):  # type: ignore[no-untyped-def]  # inferred
    return load_tasks(str(spec), held_out=held_out, seed=seed, size=size)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_additions_are_the_demos() -> None:
    tasks = load("additions")
    assert (len(tasks.train), len(tasks.held_out)) == (54, 27)
    everything = {(task.question, task.answer) for task in (*tasks.train, *tasks.held_out)}
    assert everything == {
        (f"What is {a} + {b}? Answer with only the number.", str(a + b)) for a in range(1, 10) for b in range(1, 10)
    }
    assert not {t.question for t in tasks.train} & {t.question for t in tasks.held_out}
    assert tasks.reward == "additions"


def test_the_seed_makes_the_split() -> None:
    assert load("additions", seed=1) == load("additions", seed=1)
    assert load("additions", seed=1) != load("additions", seed=2)


def test_copy_can_be_learned_without_meeting_the_held_out_questions() -> None:
    tasks = load("copy")
    assert {t.answer for t in tasks.held_out} <= {t.answer for t in tasks.train}
    assert all(t.answer in t.question for t in (*tasks.train, *tasks.held_out))


@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=30).filter(lambda names: len(set(names)) > 1),
    st.floats(0.01, 0.99),
    st.integers(0, 9),
)
def test_split_loses_nothing_and_shares_no_question(names: list[str], share: float, seed: int) -> None:
    tasks = [Task(name, str(index)) for index, name in enumerate(names)]
    train, kept = split(tasks, share, seed)
    assert train
    assert kept
    assert sorted(int(t.answer) for t in train + kept) == list(range(len(tasks)))
    assert not {t.question for t in train} & {t.question for t in kept}


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_split_refuses_a_share_that_is_none(share: float) -> None:
    with pytest.raises(TaskError, match="held_out="):
        split(additions(), share, 0)


def test_split_refuses_one_question() -> None:
    with pytest.raises(TaskError, match="1 distinct"):
        split([Task("q", "1"), Task("q", "2")], 0.5, 0)


def test_jsonl(tmp_path: Path) -> None:
    rows = [{"question": f"é {i}?\u2028x", "answer": str(i), "more": 1} for i in range(4)]
    path = write(
        tmp_path / "t.jsonl", "\ufeff" + json.dumps(rows[0]), "", *(json.dumps(r, ensure_ascii=False) for r in rows[1:])
    )
    tasks = load(path, held_out=0.25)
    assert len(tasks.train) == 3
    assert sorted(t.answer for t in (*tasks.train, *tasks.held_out)) == ["0", "1", "2", "3"]
    assert all("\u2028" in t.question for t in tasks.train)
    assert tasks.reward == "exact"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{not json", "line 2"),
        ('{"question": "q"}', "no key 'answer'"),
        ('{"answer": "a"}', "no key 'question'"),
        ('{"question": "q", "answer": 7}', "'answer' is 7"),
        ('{"question": null, "answer": "a"}', "'question' is null"),
        ('{"question": " ", "answer": "a"}', "'question' is empty"),
        ('["q", "a"]', "found list"),
    ],
)
def test_jsonl_names_file_and_line(tmp_path: Path, bad: str, said: str) -> None:
    path = write(tmp_path / "tasks.jsonl", '{"question": "q", "answer": "a"}', bad)
    with pytest.raises(TaskError) as caught:
        load(path)
    for part in (str(path), "line 2", said):
        assert part in str(caught.value)
    assert "line 1:" not in str(caught.value)


def test_jsonl_names_a_line_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "a"}\n{"question": "\xff", "answer": "a"}\n')
    with pytest.raises(TaskError, match="line 2: 'utf-8'"):
        load(path)


def test_jsonl_lists_several_bad_lines_but_not_a_thousand(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        load(write(tmp_path / "t.jsonl", *["bad"] * 1000))
    text = str(caught.value)
    assert "line 5:" in text
    assert "line 6:" not in text
    assert "and 995 more" in text


def test_jsonl_empty_missing_or_a_directory(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no task"):
        load(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(TaskError, match=r"cannot read .*none\.jsonl"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="cannot read"):
        load(tmp_path)


def test_unknown_task_says_what_there_is() -> None:
    with pytest.raises(TaskError, match=r"unknown task 'aditions'.*additions, copy.*reasoning-gym:NAME"):
        load("aditions")


def test_reasoning_gym_has_its_own_verifier() -> None:
    tasks = load("reasoning-gym:chain_sum?max_terms=3&allow_negation=false&max_digits=1")
    assert len(tasks.train) + len(tasks.held_out) <= 20
    assert tasks.reward == "verifier"
    for task in tasks.train:
        assert task.score is not None
        assert task.score(f" {task.answer}\n") == 1.0
        assert task.score("no idea") == 0.0
    assert tasks == load("reasoning-gym:chain_sum?max_terms=3&allow_negation=false&max_digits=1")


def test_reasoning_gym_white_space_around_an_answer_costs_nothing() -> None:
    task = load("reasoning-gym:letter_counting", size=4).train[0]  # compared as text by its verifier
    assert task.score is not None
    assert task.score(f" {task.answer}\n") == 1.0


def test_reasoning_gym_nonsense_that_a_verifier_cannot_parse_is_wrong_not_an_error() -> None:
    task = load("reasoning-gym:prime_factorization", size=4).train[0]
    assert task.score is not None
    assert task.score("hello") == 0.0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("chain_sun", "no dataset 'chain_sun'. Did you mean chain_sum"),
        ("chain_sum?min_terms=9&max_terms=2", "max_terms must be >= min_terms"),
        ("chain_sum?terms=2", "unexpected keyword argument 'terms'"),
    ],
)
def test_reasoning_gym_refusals(spec: str, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(f"reasoning-gym:{spec}")
    assert said in str(caught.value)


def test_reasoning_gym_missing_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("reasoning_gym"):
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"pip install 'lightrft\[train\]'"):
        load("reasoning-gym:chain_sum")
