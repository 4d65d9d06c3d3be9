"""How a law is searched for values that break it: seeds, what is kept, and when it ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import strategies as st

from lightrft.backends import fake
from lightrft.conformance import law as laws
from lightrft.conformance.law import Law, Make, Target, check, search

FAKE = Target(name="fake", build=fake.build, examples=20)


def recording(seen: list[int], breaks_from: int = 10**9, seconds: float = 0.0) -> Law:
    def body(make: Make, value: int) -> None:
        seen.append(value)
        time.sleep(seconds)
        assert value < breaks_from, f"{value} is too much"

    return Law("T1: numbers are small", body, {"value": st.integers(0, 10**6)})


def test_a_seed_repeats_a_search_and_another_does_not() -> None:
    first, again, other = list[int](), list[int](), list[int]()
    for seen, seed in ((first, 3), (again, 3), (other, 4)):
        assert search(recording(seen), FAKE, None, seed=seed) is None
    assert len(first) == 20
    assert first == again != other


def test_the_smallest_values_are_what_is_told() -> None:
    broken = search(recording([], breaks_from=1000), FAKE, None, seed=0)
    assert broken is not None
    assert broken.values == {"value": 1000}
    with pytest.raises(AssertionError, match="1000 is too much") as caught:
        check(recording([], breaks_from=1000), FAKE, None)
    assert any("broken by fake for {'value': 1000}" in note for note in caught.value.__notes__)


def test_what_failed_is_kept_and_tried_first(tmp_path: Path) -> None:
    assert search(recording([], breaks_from=1000), FAKE, None, seed=0, database=tmp_path) is not None
    again: list[int] = []
    assert search(recording(again), FAKE, None, seed=99, database=tmp_path) is None, "it was mended"
    assert again[0] == 1000
    unknown: list[int] = []
    assert search(recording(unknown), FAKE, None, seed=99) is None
    assert unknown[0] != 1000


def test_making_values_smaller_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "SHRINK_S", 0.3)
    start = time.monotonic()
    broken = search(recording([], breaks_from=1, seconds=0.05), FAKE, None, seed=0)
    assert broken is not None
    assert isinstance(broken.error, AssertionError)
    assert time.monotonic() - start < 5.0
