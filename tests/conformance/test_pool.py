"""The rank pool: results, exceptions, faults, and what it leaves behind."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import pool_bodies
from lightrft.conformance.pool import RankFailure, RankPool, rank_pool
from lightrft.strategy.record import bind
from support import hears_ctrl_c

pytestmark = pytest.mark.backends


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2, timeout=20.0, environ={"LIGHTRFT_POOL_TEST": "yes"}) as made:
        yield made


def gone(pid: int) -> bool:
    """Whether the process has ended; a zombie that nobody has collected yet counts as gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:  # ended just now, or a system without /proc
        return Path("/proc/self").exists()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def rank_here(offset: int) -> int:
    """A function of this very file, which has a name that only pytest knows."""
    return dist.get_rank() + offset


# ------------------------------------------------------------------------------------------------------------ results


def test_every_rank_answers_in_rank_order_in_one_group_and_one_thread(pool: RankPool) -> None:
    assert pool.run(pool_bodies.rank_and_threads) == [(0, 1), (1, 1)]
    assert pool.run(pool_bodies.sum_over_ranks, number=2.0) == [6.0, 6.0]


def test_ranks_know_their_places_and_no_port_is_set(pool: RankPool) -> None:
    first, second = pool.run(pool_bodies.places)
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LIGHTRFT_POOL_TEST": "yes"}
    assert first == {**common, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": os.environ.get("MASTER_PORT")}
    assert second["RANK"] == second["LOCAL_RANK"] == "1"


def test_processes_are_kept_between_runs(pool: RankPool) -> None:
    pool.run(pool_bodies.nothing)
    pids = pool.pids()
    assert pool.run(os.getpid) == pids
    assert len(set(pids)) == 2


def test_functions_of_a_test_module_can_be_sent(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool.run(rank_here, 5) == [5, 6]
    assert pool.run(bind(rank_here, 7)) == [7, 8]

    # What pytest does with a file that no entry of sys.path leads to.
    name, file = "known_only_to.pytest_itself", tmp_path / "test_itself.py"
    file.write_text("class Own: ...\n\ndef make() -> Own:\n    return Own()\n")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "known_only_to", ModuleType("known_only_to"))
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert [type(made) for made in pool.run(module.make)] == [module.Own, module.Own]


def test_tensors_go_there_and_back(pool: RankPool) -> None:
    sent = torch.arange(100_000, dtype=torch.float64)
    for back in pool.run(pool_bodies.doubled, sent):
        assert torch.equal(back, sent * 2)


def test_a_rank_ignores_ctrl_c(pool: RankPool) -> None:
    pids = pool.run(os.getpid)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert pool.run(os.getpid) == pids


def test_overhead_of_a_warm_run_is_small(pool: RankPool) -> None:
    pool.run(pool_bodies.nothing)
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        pool.run(pool_bodies.nothing)
        seconds.append(time.perf_counter() - start)
    print(f"a run of two ranks takes {statistics.median(seconds) * 1e3:.2f} ms")  # noqa: T201
    assert statistics.median(seconds) <= 0.025, "the target is 5 ms; five times that for a busy machine"


# --------------------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_one_type_of_exception_comes_back_as_itself_and_the_ranks_stay(pool: RankPool, ranks: list[int]) -> None:
    pids = pool.run(os.getpid)
    with pytest.raises(ValueError, match=rf"^3 is too much for rank {ranks[0]}\n") as caught:
        pool.run(pool_bodies.raise_from, 3, ranks)
    (note,) = caught.value.__notes__
    assert f"raise_from in a rank pool: {len(ranks)} of 2 ranks failed" in note
    for rank in range(2):
        assert f"rank {rank} {'raised ValueError: 3 is' if rank in ranks else 'returned 3'}" in note
        assert (f"\nrank {rank}: Traceback" in note) == (rank in ranks)
    assert "pool_bodies.py" in note
    assert pool.run(os.getpid) == pids
    assert pool.run(pool_bodies.sum_over_ranks, 1.0) == [3.0, 3.0]


def test_two_types_of_exception_become_a_rank_failure(pool: RankPool) -> None:
    with pytest.raises(
        RankFailure, match=r"rank 0 raised KeyError: 'zero'\n  - rank 1 raised ValueError: one"
    ) as caught:
        pool.run(pool_bodies.raise_two_types)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("body", "told"), [(pool_bodies.raise_unpicklable, "Unpicklable: 1 and 2"), (pool_bodies.leave, "SystemExit: 3")]
)
def test_exceptions_that_cannot_or_must_not_come_back_become_a_rank_failure(
    pool: RankPool, body: Callable[[], None], told: str
) -> None:
    pids = pool.run(os.getpid)
    with pytest.raises(RankFailure, match=told):
        pool.run(body)
    assert pool.run(os.getpid) == pids


def test_what_cannot_be_sent_is_refused_before_anything_is_sent() -> None:
    with rank_pool(2) as pool:

        def closure() -> object:
            return pool

        for function in (closure, lambda: None):
            with pytest.raises(TypeError, match="top of a module, no lambda or closure"):
                pool.run(function)
        assert pool.pids() == []


def test_a_result_that_cannot_be_sent_is_that_ranks_failure(pool: RankPool) -> None:
    with pytest.raises(Exception, match="lambda") as caught:
        pool.run(pool_bodies.return_a_lambda)
    assert isinstance(caught.value, (pickle.PicklingError, AttributeError))


@pytest.mark.parametrize(("world_size", "timeout"), [(0, 1.0), (2, 0.0)])
def test_a_pool_of_nothing_is_refused(world_size: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="rank pool"):
        rank_pool(world_size, timeout=timeout)


def test_hypothesis_shrinks_over_exceptions_of_ranks(pool: RankPool) -> None:
    @settings(database=None, max_examples=100, derandomize=True)
    @given(st.integers(0, 1000))
    def inner(number: int) -> None:
        pool.run(pool_bodies.raise_above_nine, number)

    with pytest.raises(ValueError, match=r"^10 is too much for rank 1\n"):
        inner()


# ------------------------------------------------------------------------------------------------------------- faults


def test_ranks_that_wait_for_one_that_raised_do_not_hide_it(pool: RankPool) -> None:
    pids = pool.run(os.getpid)
    with pytest.raises(ValueError, match="in vain") as caught:
        pool.run(pool_bodies.raise_before_the_collective)
    assert "rank 1 gave no answer within 2 s after rank 0 failed" in caught.value.__notes__[0]
    assert pool.pids() == []
    assert all(map(gone, pids))


def test_a_group_out_of_step_is_replaced(pool: RankPool) -> None:
    pids = pool.run(os.getpid)
    with pytest.raises(ValueError, match="out of step"):
        pool.run(pool_bodies.raise_out_of_step)
    assert pool.run(pool_bodies.sum_over_ranks, 1.0) == [3.0, 3.0]
    assert not set(pids) & set(pool.pids())


def test_a_rank_that_hangs_is_named_within_the_time_limit(pool: RankPool) -> None:
    pids = pool.run(os.getpid)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 0 returned 17\n  - rank 1 gave no answer within 0.5 s") as caught:
        pool.run_within(0.5, pool_bodies.hang_on_rank_1)
    assert caught.value.hung == (1,)
    stood = str(caught.value).partition("rank 1 stood at:")[2]
    assert "in hang_on_rank_1" in stood
    assert "_leave_with_parent" not in stood
    assert time.monotonic() - start < 3.0
    assert all(map(gone, pids))


@pytest.mark.parametrize(("how", "told"), [("exit", "ended with exit code 7"), ("kill", "was killed by SIGKILL")])
def test_a_rank_that_dies_is_named(pool: RankPool, how: str, told: str) -> None:
    pool.run(pool_bodies.nothing)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank 1 {told}"):
        pool.run(pool_bodies.end_rank_1, how)
    assert time.monotonic() - start < 6.0
    assert pool.pids() == []


def test_a_rank_that_died_between_runs_fails_the_next_one_only(pool: RankPool) -> None:
    pids = pool.run(os.getpid)
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until(lambda: gone(pids[0]))
    with pytest.raises(RankFailure, match="rank 0 was killed by SIGKILL"):
        pool.run(pool_bodies.nothing)
    assert pool.pids() == []


# ------------------------------------------------------------------------------------------- nothing is left behind


def pool_directories() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("lightrft-pool-*"))


def test_close_leaves_nothing_and_a_later_run_starts_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with rank_pool(1) as pool:
        pids = pool.run(os.getpid)
        assert len(pool_directories()) == 1
        assert pool.run(pool_bodies.build_local) == ["local"]
        assert pool.run(pool_bodies.destroy_the_group) == [None], "a run without its group: new ranks at the next one"
        pids += pool.run(os.getpid)
        assert len(set(pids)) == 2
        pool.close()
        pool.close()
    assert pool.pids() == []
    assert all(map(gone, pids))
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import os, signal, sys
from lightrft.conformance.pool import rank_pool

if __name__ == "__main__":
    pool = rank_pool(2)
    print(*pool.run(os.getpid), flush=True)
    if sys.argv[1] == "hang":
        pool.run(signal.pause)
"""


@pytest.mark.parametrize(("then", "with_signal"), [("hang", signal.SIGKILL), ("hang", signal.SIGINT), ("end", None)])
def test_no_process_or_file_outlives_the_parent(tmp_path: Path, then: str, with_signal: signal.Signals | None) -> None:
    script, temporary = tmp_path / "opens_a_pool.py", tmp_path / "tmp"
    script.write_text(SCRIPT)
    temporary.mkdir()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, str(script), then],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hears_ctrl_c,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2, parent.communicate()[1]
    try:
        if with_signal is signal.SIGKILL:
            parent.kill()
        elif with_signal is signal.SIGINT:
            os.killpg(parent.pid, signal.SIGINT)  # as a terminal does it
        errors = parent.communicate(timeout=30)[1]
        assert wait_until(lambda: all(map(gone, pids)))
        assert wait_until(lambda: not list(temporary.iterdir())), list(temporary.iterdir())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    if with_signal is None:
        assert (parent.returncode, errors) == (0, "")
    elif with_signal is signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert errors.count("Traceback") == 1, "the ranks say nothing"
