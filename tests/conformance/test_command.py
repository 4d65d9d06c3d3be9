"""``lightrft conformance`` and ``pytest --pyargs lightrft.conformance``, as they are typed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import lightrft
from lightrft.cli import run_command
from lightrft.conformance.command import ConformanceOptions, targets_of
from lightrft.conformance.law import Target
from lightrft.conformance.report import Report, as_html, as_json, as_markdown, failures
from lightrft.conformance.run import BackendReport, Outcome, Result, read_xfails
from lightrft.errors import ConfigError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs and examples go."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_matrix_of_backends_and_one_of_engines(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"report{ending}" for ending in (".html", ".md", ".json")]
    words = ["fake", "--engines", "scripted", "--laws", "R5", "--seed", "7", "--report", *files]
    assert run_command(["conformance", *words]) == 0
    out = capsys.readouterr().out
    assert re.search(r"fake W1.*R5: a bad prompt.*scripted.*R5: what cannot be served", out, flags=re.DOTALL)
    assert "seed 7" in out
    found = json.loads((here / "report.json").read_text())
    assert [backend["name"] for backend in found["backends"]] == ["fake", "scripted"]
    assert {one["outcome"] for one in found["backends"][1]["results"]} == {"passed"}
    assert (here / ".lightrft/conformance/fake-W1.log").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing to check"),
        (["fakee"], "Did you mean 'fake'?"),
        (["deepspeed-4"], "deepspeed-0 to deepspeed-3"),
        (["fake", "--laws", "X9"], "no law has 'X9'"),
        (["fake", "--report", "report.pdf"], "none of .html, .md, .json"),
        (["fake", "--xfails", "none.txt"], "none.txt cannot be read"),
        (["nowhere.at.all:build"], "cannot be imported"),
        (["--engines", "vlm"], "Did you mean 'vllm'?"),
    ],
)
def test_a_mistake_is_a_sentence(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["conformance", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_laws_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["conformance", "--list", "--laws", "R7: greedy"]) == 0
    assert capsys.readouterr().out == "R7: greedy tokens are Hugging Face's\n"


def test_what_a_name_stands_for() -> None:
    options = ConformanceOptions(world=(1, 2))
    assert [(one.name, one.world_size) for one in targets_of("local", options)] == [("local", 1)]
    assert [one.title for one in map(as_report, targets_of("deepspeed", options))] == [
        f"deepspeed-{stage} W{world}" for stage in range(4) for world in (1, 2)
    ]
    assert targets_of("deepspeed-3", options)[0].fields == {"zero_stage": 3}
    (fake,) = targets_of("fake", ConformanceOptions(without=("checkpoints",)))
    assert not fake.capabilities


def as_report(target: Target) -> BackendReport:
    return BackendReport(name=target.name, world_size=target.world_size, results=())


def test_an_xfail_file_needs_reasons(here: Path) -> None:
    file = here / "xfails.txt"
    file.write_text("# ours\n\nT1: two  # one at a time\nT2\n")
    with pytest.raises(ConfigError, match=r"line 4: 'T2' has no reason"):
        read_xfails(file)
    file.write_text("T1: two  # one at a time\n")
    assert read_xfails(file) == {"T1: two": "one at a time"}


def report() -> Report:
    results = [
        Result(law="T1: a", outcome=Outcome.PASSED, seconds=1.0),
        Result(
            law="T2: <b> | c", outcome=Outcome.FAILED, why="AssertionError: 1 < 2", reproduction="def test_T2(): ..."
        ),
        Result(law="T3: d", outcome=Outcome.HUNG, why="rank 1 stood at: x"),
    ]
    return Report(
        columns=[
            BackendReport(name="theirs", world_size=2, results=results),
            BackendReport(name="vllm", world_size=None, results=[Result(law="R1: e", outcome=Outcome.SKIPPED, why="no")]),
        ],
        profile="quick", seed=1, seconds=3.0, made_on="2026-01-01T00:00:00+00:00", versions={"torch": "2"},
    )  # fmt: skip


def test_a_report_as_html_markdown_and_json() -> None:
    html, markdown, told = as_html(report()), as_markdown(report()), json.loads(as_json(report()))
    assert "<td>T2: &lt;b&gt; | c</td><td class='c failed' title='0.00 s. AssertionError: 1 &lt; 2'>" in html
    (target,) = re.findall(r"href='#([^']*T2[^']*)'", html)
    assert f"id='{target}'" in html
    assert "<pre>def test_T2(): ...</pre>" in html
    assert "| T2: <b> \\| c | ✗ |" in markdown
    assert "1 passed, 1 failed, 1 hung, 1 skipped" in markdown
    assert not told["good"]
    assert [one["outcome"] for one in told["backends"][0]["results"]] == ["passed", "failed", "hung"]
    assert "theirs W2: T3: d: hung\n\n    rank 1 stood at: x" in failures(report())


def in_pytest(*words: str) -> subprocess.CompletedProcess[str]:
    installed = any(point.value == "lightrft.conformance.plugin" for point in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "lightrft.conformance.plugin"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "--pyargs", "lightrft.conformance", *words]
    environ = {**os.environ, "PYTHONPATH": str(Path(lightrft.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)


@pytest.mark.slow
def test_in_pytest(here: Path) -> None:
    file = here / "xfails.txt"
    file.write_text("T5  # never\n")
    done = in_pytest("--strategy", "lightrft.backends.fake:build", "--lacking", "engine", "bf16", "--xfails", str(file),
                     "-k", "T5 or T10 or test_building")  # fmt: skip
    assert "[XPASS(strict)] never" in done.stdout
    assert "1 failed, 2 passed, 3 skipped" in done.stdout
    assert done.returncode == 1


def test_in_pytest_a_mistake_is_a_sentence(here: Path) -> None:
    done = in_pytest("--strategy", "fakee")
    assert "UsageError: backend='fakee' is not known. Did you mean 'fake'?" in done.stdout
    assert done.returncode != 0
