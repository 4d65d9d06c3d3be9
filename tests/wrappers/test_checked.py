"""``checked``: ranks that disagree all raise an error that says who called what (G4)."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attrs import define, field

from lightrft import Strategy, StrategyConfig
from lightrft.backends import local
from lightrft.strategy.record import StrategyRecord, evolve
from lightrft.wrappers import checked
from lightrft.wrappers.checked import COMPARED, Meeting, describe, leave, meet

BODIES = Path(__file__).with_name("checked_bodies.py")
RAISED_WITHIN_S = 2.0

Reports = list[dict[str, tuple[str | None, float]]]


def run_ranks(
    world_size: int, meeting_point: str, directory: Path, launcher: Mapping[str, str] | None = None
) -> Reports:
    """The reports of a world of processes, by rank."""
    reports = [directory / f"{rank}.json" for rank in range(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(launcher or {})}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(BODIES), str(world_size), str(rank), meeting_point, str(report)],
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank, report in enumerate(reports)
    ]
    try:
        logs = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    codes = [rank.returncode for rank in ranks]
    assert codes == [0, 1, 0][:world_size], "\n".join(logs)
    return [{name: (each[0], each[1]) for name, each in json.loads(report.read_text()).items()} for report in reports]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Two ranks by way of a TCPStore that a third process holds, as torchrun has it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # stubs
    launcher = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return run_ranks(2, "env://", tmp_path_factory.mktemp("pair"), launcher)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Three ranks by way of a FileStore."""
    directory = tmp_path_factory.mktemp("three")
    return run_ranks(3, f"file://{directory / 'store'}", directory)


@pytest.mark.parametrize("scenario", ["same", "training", "in step again", "in step after late"])
def test_G4_equal_calls_pass(pair: Reports, scenario: str) -> None:
    assert [rank[scenario][0] for rank in pair] == [None, None]


def test_FC24_numbers_of_any_kind_agree(pair: Reports) -> None:
    assert [rank["numbers"][0] for rank in pair] == [None, None]


DISAGREEMENTS = {
    "operations": "rank 0 called all_reduce(op='sum', data={'kl': float32[3], 'loss': number}); rank 1 called barrier()",
    "keys": "all_reduce(op='mean', data={'loss': number}); rank 1 called all_reduce(op='mean', data={'los': number})",
    "dtypes": "data={'x': float32[2]}); rank 1 called all_reduce(op='mean', data={'x': int64[2]})",
    "shapes": "data={'x': float32[2]}); rank 1 called all_reduce(op='mean', data={'x': float32[3]})",
    "ops": "rank 0 called all_reduce(op='sum', data={'x': number}); rank 1 called all_reduce(op='max',",
    "sources": "rank 0 called broadcast(src=0, data=number); rank 1 called broadcast(src=1, data=number)",
    "gathered dtypes": "rank 0 called all_gather(data=float32[...]); rank 1 called all_gather(data=bool[...])",
    "gathered keys": "rank 0 called all_gather(data={'x0': number}); rank 1 called all_gather(data={'x1': number})",
    "arity": "rank 0 called prepare(models_or_model_optim_pairs=(Linear), is_rlhf=False); rank 1 called prepare(",
    "tags": "rank 0 called save_ckpt(model=Linear, tag='step0'); rank 1 called save_ckpt(model=Linear, tag='step1')",
}


@pytest.mark.parametrize("scenario", DISAGREEMENTS)
def test_G4_ranks_that_disagree_all_raise_and_say_who_called_what(pair: Reports, scenario: str) -> None:
    for rank in pair:
        error, seconds = rank[scenario]
        assert error is not None
        assert DISAGREEMENTS[scenario] in error
        assert seconds < RAISED_WITHIN_S


def test_G4_a_rank_that_does_not_come_is_named(pair: Reports) -> None:
    error, seconds = pair[0]["late"]
    assert error is not None
    assert "called get_grad_norm(model=Linear) and waited 0.3 s for rank 1" in error
    assert "No operation was common" in error
    assert 0.3 <= seconds < RAISED_WITHIN_S
    assert pair[1]["late"][0] is None


@pytest.mark.parametrize("scenario", ["closed", "still closed"])
def test_G4_a_rank_that_closed_is_told_to_the_others(pair: Reports, scenario: str) -> None:
    error, seconds = pair[0][scenario]
    assert error is not None
    assert "rank 0 called barrier(); rank 1 called close()" in error
    assert seconds < RAISED_WITHIN_S
    assert pair[1][scenario][0] is None


def test_G4_a_rank_that_failed_alone_and_ended_is_told_to_the_others(pair: Reports) -> None:
    error, _ = pair[0]["ended"]
    assert error is not None
    assert "rank 0 called barrier(); rank 1 ended without close(), after ValueError in get_grad_norm(" in error
    assert "The last operation of all ranks was get_grad_norm(" in error


def test_G4_the_store_does_not_grow(pair: Reports) -> None:
    added, seconds = pair[0]["keys added by many calls"]
    assert added is not None
    assert abs(int(added)) <= 4
    assert seconds < 20


@pytest.mark.parametrize("scenario", ["same", "in step again"])
def test_G4_three_ranks_that_agree_pass(three: Reports, scenario: str) -> None:
    assert [rank[scenario][0] for rank in three] == [None, None, None]


def test_G4_three_ranks_all_raise(three: Reports) -> None:
    for rank in three:
        error, seconds = rank["one differs"]
        assert error is not None
        assert "rank 0 called all_gather(data=number); rank 1 called barrier()" in error
        assert seconds < RAISED_WITHIN_S


def test_G4_two_ranks_need_not_wait_for_the_third_to_disagree(three: Reports) -> None:
    for rank in three:
        error, seconds = rank["two differ, one has not come"]
        assert error is not None
        assert "rank 1 called barrier()" in error
        assert seconds < RAISED_WITHIN_S
    assert "rank 2 has not called anything yet" in str(three[0]["two differ, one has not come"][0])


def test_G4_every_survivor_of_three_hears_of_the_end(three: Reports) -> None:
    assert all("rank 1 ended without close()" in str(three[rank]["ended"][0]) for rank in (0, 2))


# ------------------------------------------------------------------------------------------------------ one process


def alone() -> StrategyRecord:
    return local.build(StrategyConfig.from_args({"bf16": False}))


def test_G4_a_single_rank_is_not_wrapped() -> None:
    strategy = alone()
    assert checked(strategy) is strategy


def name_of(strategy: Strategy) -> str:
    """What mypy and pyright check: that a wrapped strategy is a ``Strategy``."""
    return strategy.name


def test_G4_a_checked_strategy_shows_the_true_signatures() -> None:
    strategy = alone()
    wrapped = checked(evolve(strategy, world_size=2))
    assert name_of(wrapped) == "local"
    for operation in (*COMPARED, "close"):
        inner: Callable[..., object] = getattr(strategy, operation)
        outer: Callable[..., object] = getattr(wrapped, operation)
        assert outer is not inner
        assert inspect.signature(outer) == inspect.signature(inner)
    assert wrapped.is_rank_0 is strategy.is_rank_0


def test_G4_without_a_process_group_nothing_is_asked() -> None:
    wrapped = checked(evolve(alone(), world_size=2))
    assert wrapped.all_reduce(2.0, "sum") == 2.0
    with pytest.raises(ValueError, match="op="):
        wrapped.all_reduce(2.0, "avg")  # type: ignore[call-overload]  # the error is the point
    with pytest.raises(TypeError, match="data"):
        wrapped.all_reduce()  # type: ignore[call-overload]  # the error is the point
    wrapped.close()
    wrapped.close()


@define
class Keys:
    """A store in this process, in which another rank is slow to remove the word that tells that it has read the rest."""

    words: dict[str, str] = field(factory=dict)
    slow: str = ""
    asked: int = 0

    def set(self, key: str, value: str, /) -> None:
        self.words[key] = value

    def get(self, key: str, /) -> bytes:
        return self.words[key].encode()

    def check(self, keys: list[str], /) -> bool:
        self.asked += keys == [self.slow]
        if self.asked == 3:
            self.words.pop(self.slow)
        return all(key in self.words for key in keys)

    def add(self, key: str, value: int, /) -> int:
        raise NotImplementedError(key)

    def delete_key(self, key: str, /) -> bool:
        return self.words.pop(key, None) is not None


def test_G4_a_rank_that_closes_keeps_the_store_until_the_others_have_read_its_last_word() -> None:
    store = Keys({"k/0/0": "joined", "k/0/1": "joined", "k/1/1": "barrier()"}, slow="k/0/1")
    meeting = Meeting(rank=0, world_size=2, timeout=timedelta(seconds=1), store=store, prefix="k")
    meet(meeting, "barrier()")
    assert store.asked == 0
    leave(meeting, "called close()")
    assert store.asked == 3
    assert store.words == {"k/1/0": "barrier()", "k/1/1": "barrier()", "k/gone/0": "called close()"}
    leave(meeting, "called close()")


def test_G4_descriptions_ignore_the_order_of_keys_and_the_device() -> None:
    one = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": {"x": 1}}
    assert describe(one) == describe(dict(reversed(one.items()))) == "{'a': {'x': number}, 'b': bfloat16[2, 3]}"
    assert describe(torch.zeros(2), shapes=False) == describe(torch.zeros(3), shapes=False) == "float32[...]"
