"""How ranks meet, fail and part, in processes of their own (W1 to W3, G4, FC18, FC43)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backends import ranks_bodies
from backends.ranks_bodies import IMPATIENT, PARTING, TIMEOUT, Blocks
from lightrft.backends.fsdp import shape_of_mesh
from lightrft.conformance.pool import RankPool, rank_pool
from lightrft.errors import ConfigError
from lightrft.ops.ranks import LATE
from lightrft.ops.world import discover
from support import MakeStrategy, hears_ctrl_c

BODIES = Path(ranks_bodies.__file__)
TWO_NODES = Path(__file__).parents[2] / "scripts" / "two_nodes.sh"
LAUNCHERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
BACKENDS = ("fsdp", "deepspeed")
SLACK_S = 10.0
"""What a loaded machine may add to a time limit."""

Reports = dict[str, dict[str, dict[str, object]]]

COMMON = (
    "alone",
    "trained",
    "trained#2",
    "met",
    "rank 1 never comes",
    "killed_in_all_reduce",
    "killed_in_forward",
    "killed_in_backward",
    "killed_in_optimizer_step",
)
SCENARIOS: Mapping[str, Sequence[str]] = {
    "fsdp": (
        *COMMON,
        "rank 0 never comes",
        "port in use, rank 0",
        "port in use, rank 1",
        "no such host",
        "half set",
        "impatient",
        "leaves early",
    ),
    "deepspeed": (*COMMON, "alone-stage-3", "killed_in_backward_stage_3", "killed_at_stage_0"),
}


@frozen
class Ended:
    """A process that has ended, and what it left running."""

    code: int
    output: str
    errors: str
    left: Sequence[int]


def run(command: Sequence[str], directory: Path, seconds: float = 120.0, **environ: str) -> Ended:
    """Runs a command to its end; whatever of it is still there afterwards is killed and told."""
    mark = uuid.uuid4().hex
    clean = {key: value for key, value in os.environ.items() if key not in LAUNCHERS_OWN}
    places = {"TMPDIR": str(directory), "OMP_NUM_THREADS": "1", "LIGHTRFT_TEST_MARK": mark}
    process = subprocess.Popen(
        command,
        env=clean | places | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    finally:
        left = marked(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    return Ended(process.returncode, output, errors, left)


def marked(mark: str) -> list[int]:
    """The processes that have this mark in their environment, as what was started by a marked one has."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reports]:
    """What came of every scenario, by backend; filled as it is asked for."""
    return {}


@pytest.fixture
def reports(
    worlds: dict[str, Reports], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    """Those of one backend."""
    backend = request.param
    if backend not in worlds:
        places = [tmp_path_factory.mktemp(name) for name in ("reports", "temporary")]
        command = [sys.executable, str(BODIES), "worlds", backend, str(places[0]), *SCENARIOS[backend]]
        ended = run(command, places[1], 240.0)
        assert ended.code == 0, ended.errors
        assert not ended.left
        worlds[backend] = json.loads(ended.output.splitlines()[-1])
    return worlds[backend]


on_both = pytest.mark.parametrize("reports", BACKENDS, indirect=True)
on_fsdp = pytest.mark.parametrize("reports", ["fsdp"], indirect=True)
on_deepspeed = pytest.mark.parametrize("reports", ["deepspeed"], indirect=True)
here = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")

# --------------------------------------------------------------------------------------------------------- they meet


def is_told(report: Mapping[str, object], *said: str, within: float) -> None:
    assert report["error"] == "RankError"
    assert report["code"] == 1
    text = str(report["text"])
    for each in said:
        assert each in text
    assert text.count("\n") == 0
    assert "frame #" not in text
    assert ".cpp" not in text
    assert cast(float, report["seconds"]) < within


@here
@pytest.mark.backends
@on_both
def test_W2_a_rank_1_that_never_comes_is_told_to_rank_0(reports: Reports) -> None:
    limit = (IMPATIENT + LATE).total_seconds()
    is_told(
        reports["rank 1 never comes"]["0"],
        "rank 0 of 2",
        "127.0.0.1:",
        "within 1 s",
        "Start all 2 ranks with one launcher",
        within=limit + SLACK_S,
    )


@here
@pytest.mark.backends
@on_fsdp
@pytest.mark.parametrize(
    ("scenario", "rank", "said"),
    [
        ("rank 0 never comes", "1", "nobody listens there (Connection refused)"),
        ("port in use, rank 0", "0", "address already in use"),
        ("port in use, rank 1", "1", "does not answer as rank 0 would"),
        ("no such host", "1", "no-such-host.invalid"),
    ],
)
def test_W2_nobody_to_meet_is_an_error_within_the_timeout(
    reports: Reports, scenario: str, rank: str, said: str
) -> None:
    limit = (IMPATIENT + LATE).total_seconds()
    is_told(reports[scenario][rank], said, "choose another (torchrun --master-port)", within=limit + SLACK_S)


@here
@pytest.mark.backends
@on_fsdp
def test_W2_FC43_a_half_set_environment_is_told_and_left_as_it_was(reports: Reports) -> None:
    report = reports["half set"]["0"]
    assert report["error"] == "ConfigError"
    assert "without WORLD_SIZE" in str(report["text"])
    assert report["environ"] == ["WORLD_SIZE"]  # which the test took away


@here
@pytest.mark.backends
@on_both
def test_W2_FC43_no_failure_changes_the_environment(reports: Reports) -> None:
    own = {"half set", "no such host", "port in use, rank 0", "port in use, rank 1"}
    changed = {
        name: report.get("environ", [])
        for name, ranks in reports.items()
        if name not in own
        for report in ranks.values()
    }
    assert not any(changed.values()), changed


def test_W2_an_address_of_IPv6_is_one_in_a_url() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "fe80::1", "MASTER_PORT": "29500"}
    assert discover(environ).address == "[fe80::1]:29500"


@here
@pytest.mark.backends
@on_both
def test_FC18_the_timeout_reaches_the_process_group(reports: Reports) -> None:
    assert [reports["met"][rank]["timeout"] for rank in "01"] == [1234.0, 1234.0]
    assert [reports["met"][rank]["total"] for rank in "01"] == [2.0, 2.0]


@here
@pytest.mark.backends
@on_fsdp
def test_FC18_a_rank_that_does_not_come_to_a_barrier_is_waited_for_as_long_as_was_said(reports: Reports) -> None:
    report = reports["impatient"]["0"]
    assert report["error"] == "RankError"
    assert "barrier" in str(report["text"])
    assert "rank 1 on" in str(report["text"])
    assert 2.0 <= cast(float, report["seconds"]) < 2.0 + 2.0 + SLACK_S
    assert reports["impatient"]["1"]["code"] == 0


@here
@pytest.mark.backends
@on_both
def test_W1_FC43_without_a_launcher_one_process_trains(reports: Reports) -> None:
    report = reports["alone"]["0"]
    assert report["code"] == 0, report
    assert report["world_size"] == 1
    assert report["opened_by_build"] == []
    # gloo listens on one port of its own for each group, even where nobody else can come: no store does.
    assert cast(int, report["listening"]) <= 1
    assert report["group"] is False


@here
@pytest.mark.backends
@on_deepspeed
def test_FC43_without_a_launcher_one_process_trains_at_stage_3(reports: Reports) -> None:
    report = reports["alone-stage-3"]["0"]
    assert report["code"] == 0, report
    assert report["environ"] == []


# -------------------------------------------------------------------------------------------------- one of them fails


def names_rank_1(report: Mapping[str, object], operation: str) -> None:
    notes = " ".join(map(str, cast("list[object]", report["notes"])))
    told = f"{report['text']} {notes}"
    assert f"rank 0 of 2, {operation}: rank 1 (process " in told, report
    assert "is gone" in told
    assert report["code"] == 1, report
    assert cast(float, report["seconds"]) < TIMEOUT.total_seconds()


@here
@pytest.mark.backends
@on_both
@pytest.mark.parametrize("operation", ["all_reduce", "forward", "backward", "optimizer_step"])
def test_rank_1_killed_in_the_middle_is_named_by_rank_0(reports: Reports, operation: str) -> None:
    ranks = reports[f"killed_in_{operation}"]
    assert ranks["1"]["code"] == -signal.SIGKILL
    names_rank_1(ranks["0"], operation)
    assert ranks["0"]["error"] == ("RuntimeError" if operation == "forward" else "RankError")


@here
@pytest.mark.backends
@on_deepspeed
@pytest.mark.parametrize(
    ("scenario", "operation"), [("killed_in_backward_stage_3", "backward"), ("killed_at_stage_0", "optimizer_step")]
)
def test_rank_1_killed_is_named_at_the_other_stages(reports: Reports, scenario: str, operation: str) -> None:
    names_rank_1(reports[scenario]["0"], operation)


@here
@pytest.mark.backends
def test_rank_1_killed_under_torchrun_ends_all_of_it(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, "train", "fsdp", "0", "backward")
    assert ended.code != 0
    assert "Signal 9 (SIGKILL) received" in ended.errors
    assert not ended.left


def torchrun(directory: Path, *arguments: str) -> Ended:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*launcher, str(BODIES), *arguments], directory)


# ------------------------------------------------------------------------------------------------------- and they part


@here
@pytest.mark.backends
@on_both
def test_W3_close_leaves_no_group_no_process_and_no_file(reports: Reports) -> None:
    for rank in "01":
        for scenario in ("trained", "trained#2"):
            report = reports[scenario][rank]
            assert report["code"] == 0, report
            assert report["group"] is False
            assert report["children"] == []
            assert report["files"] == []
            assert report["log"] == [] or rank == "0"
        assert reports["met"][rank]["listening"] == []
        assert reports["met"][rank]["code"] == 0


@here
@pytest.mark.backends
@pytest.mark.parametrize("backend", BACKENDS)
def test_W3_two_ranks_under_torchrun_train_and_end_well(backend: str, tmp_path: Path) -> None:
    trains_and_ends_well(backend, tmp_path)


@here
@pytest.mark.backends
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_W3_five_times_out_of_five(backend: str, tmp_path: Path) -> None:
    for _ in range(5):
        trains_and_ends_well(backend, tmp_path)


def trains_and_ends_well(backend: str, directory: Path) -> None:
    ended = torchrun(directory, "train", backend, "3", "")
    assert ended.code == 0, ended.errors
    assert ended.output.splitlines()[-1] == "trained on 2 ranks in 1 networks"
    assert not ended.left
    assert "leaves without" not in ended.errors


@here
@pytest.mark.backends
@on_fsdp
def test_W3_a_rank_that_leaves_early_waits_no_longer_than_it_says(reports: Reports) -> None:
    first, other = reports["leaves early"]["1"], reports["leaves early"]["0"]
    assert first["code"] == 0
    assert first["log"] == ["rank 1 of 2 leaves without the others"]
    assert PARTING.total_seconds() <= cast(float, first["closed_after"]) < PARTING.total_seconds() + SLACK_S / 2
    names_rank_1(other, "barrier")


# ----------------------------------------------------------------------------------------------- in a pool of two ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2, timeout=60.0) as made:
        yield made


@given(machines=st.integers(1, 40), per_node=st.integers(1, 16))
def test_a_mesh_has_every_rank_once_and_a_machine_in_each_row(machines: int, per_node: int) -> None:
    shape = shape_of_mesh(machines * per_node, per_node)
    assert shape == ((per_node,) if machines == 1 else (machines, per_node))


@given(world_size=st.integers(1, 200), per_node=st.integers(-2, 20))
def test_a_world_that_does_not_divide_is_refused(world_size: int, per_node: int) -> None:
    fits = per_node > 0 and (world_size <= per_node or world_size % per_node == 0)
    if fits:
        shape = shape_of_mesh(world_size, per_node)
        assert torch.Size(shape).numel() == world_size
        assert shape[-1] == min(world_size, per_node)
    else:
        with pytest.raises(ConfigError, match=f"world_size={world_size} .*num_gpu_per_node={per_node}"):
            shape_of_mesh(world_size, per_node)


@pytest.mark.backends
def test_two_machines_of_one_rank_train_as_one_machine_of_two(pool: RankPool) -> None:
    one = pool.run(ranks_bodies.trained_over_machines_of, 8)
    two = pool.run(ranks_bodies.trained_over_machines_of, 1)
    assert [shape for shape, _ in one] == [(2,), (2,)]
    assert [shape for shape, _ in two] == [(2, 1), (2, 1)]
    expected = torch.tensor(one[0][1])
    for _, parameters in (*one, *two):
        torch.testing.assert_close(torch.tensor(parameters), expected, rtol=1e-6, atol=1e-7)
    start = torch.cat([parameter.detach().reshape(-1) for parameter in Blocks().parameters()])
    assert not torch.allclose(start, expected, atol=1e-3)


def test_parameters_on_different_devices_are_refused_by_name(make_strategy: MakeStrategy) -> None:
    model = Blocks()
    model.blocks[1].to("meta")
    strategy = make_strategy()
    with pytest.raises(ValueError, match=r"argument 1 .*blocks\.0\.0\.weight on cpu, blocks\.1\.0\.weight on meta"):
        strategy.prepare(nn.Linear(1, 1), (model, strategy.create_optimizer(model)))
    with pytest.raises(ValueError, match=r"argument 0 .*on meta"):
        strategy.prepare(model)


@pytest.mark.backends
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_models_and_optimizers_are_refused_before_ranks_meet(backend: str, pool: RankPool) -> None:
    for texts in pool.run(ranks_bodies.refusals, backend):
        assert "argument 1" in texts["devices"]
        assert "blocks.0.0.weight on cpu, blocks.1.0.weight on meta" in texts["devices"]
        assert "holds 4 parameters that its model does not have" in texts["optimizer"]
        if backend == "deepspeed":
            assert "not prepared with an optimizer" in texts["unprepared"]


@pytest.mark.backends
def test_a_model_without_repeated_blocks_is_told_once_by_rank_0(pool: RankPool) -> None:
    first, second = pool.run(ranks_bodies.warnings_about_blocks, "fsdp")
    assert [text.partition(":")[0] for text in first] == ["Linear has no repeated block"]
    assert second == []


@pytest.mark.backends
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("variable", "field"), [(None, True), ("1", False), ("yes", False)])
def test_G4_switched_on_by_the_field_or_the_variable(
    backend: str, variable: str | None, field: bool, pool: RankPool
) -> None:
    for text, seconds, plain in pool.run(ranks_bodies.disagree, backend, variable, field):
        assert not plain
        assert text.startswith("RankMismatch: ")
        assert "rank 0 called all_reduce" in text
        assert "rank 1 called barrier" in text
        assert seconds < 2.0


@pytest.mark.backends
@pytest.mark.parametrize("variable", [None, "0", "false", ""])
def test_G4_is_off_unless_it_is_asked_for(variable: str | None, pool: RankPool) -> None:
    assert [plain for _, _, plain in pool.run(ranks_bodies.disagree, "fsdp", variable, False)] == [True, True]


@pytest.mark.backends
def test_G4_a_variable_that_is_neither_on_nor_off_is_refused(pool: RankPool) -> None:
    for text, _, _ in pool.run(ranks_bodies.disagree, "fsdp", "maybe", False):
        assert text == "ConfigError: LIGHTRFT_CHECK_RANKS='maybe' is neither on nor off. Set it to 1 or 0."


# ---------------------------------------------------------------------------------------------------------- two nodes


def two_nodes(directory: Path, *arguments: str, seconds: float = 120.0) -> Ended:
    launcher = f"{sys.executable} -m torch.distributed.run"
    ended = run([str(TWO_NODES), *arguments], directory, seconds, TORCHRUN=launcher)
    if ended.code == 77:
        pytest.skip(ended.errors.strip().splitlines()[-1])
    return ended


@here
@pytest.mark.backends
@pytest.mark.slow
def test_two_network_namespaces_train_as_two_nodes(tmp_path: Path) -> None:
    ended = two_nodes(tmp_path, str(BODIES), "train", "fsdp", "0", "")
    assert ended.code == 0, ended.errors
    assert "trained on 2 ranks in 2 networks" in ended.output
    assert not ended.left
    assert "lrft" not in namespaces()


@here
@pytest.mark.backends
@pytest.mark.slow
def test_a_node_that_fails_ends_the_other_and_the_namespaces(tmp_path: Path) -> None:
    ended = two_nodes(tmp_path, str(BODIES), "train", "fsdp", "0", "backward")
    assert ended.code not in (0, 77)
    assert not ended.left
    assert "lrft" not in namespaces()


@here
@pytest.mark.backends
@pytest.mark.slow
def test_two_nodes_are_torn_down_by_ctrl_c(tmp_path: Path) -> None:
    waiting = "import sys, threading; sys.stdout.write('here\\n'); sys.stdout.flush(); threading.Event().wait()"
    script = tmp_path / "waits.py"
    script.write_text(waiting)
    mark = uuid.uuid4().hex
    environ = os.environ | {"TORCHRUN": f"{sys.executable} -m torch.distributed.run", "LIGHTRFT_TEST_MARK": mark}
    process = subprocess.Popen(
        [str(TWO_NODES), str(script)],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hears_ctrl_c,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            pytest.skip(f"no namespaces here: exit code {process.wait(60)}")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert marked(mark) == []
        assert "lrft" not in namespaces()
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def test_two_nodes_says_how_it_is_used_and_what_is_missing(tmp_path: Path) -> None:
    usage = subprocess.run([str(TWO_NODES)], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert "scripts/two_nodes.sh COMMAND" in usage.stderr
    for tool in ("bash", "sed", "id"):
        found = subprocess.run(["/bin/sh", "-c", f"command -v {tool}"], capture_output=True, text=True, check=True)
        (tmp_path / tool).symlink_to(found.stdout.strip())
    missing = subprocess.run(
        ["/bin/sh", "-c", f"PATH={tmp_path} bash {TWO_NODES} x"], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 77
    assert "'ip' is missing" in missing.stderr


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
