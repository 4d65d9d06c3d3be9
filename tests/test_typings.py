"""typings/ says of other libraries what is true of those that are installed."""

from __future__ import annotations

import inspect

import pytest


def test_reasoning_gym_has_what_its_stub_says() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    assert "chain_sum" in DATASETS
    dataset = reasoning_gym.create_dataset("chain_sum", seed=1, size=2)
    entry = next(iter(dataset))
    assert {"question", "answer"} <= entry.keys()
    assert list(inspect.signature(dataset.score_answer).parameters) == ["answer", "entry"]
    assert float(dataset.score_answer(answer=entry["answer"], entry=entry)) == 1.0
