"""A third party's backend (``packages/example-backend``): quoted, installed, type-checked and checked as one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "packages" / "example-backend"
PAGE = ROOT / "docs" / "write-a-backend.md"
SOURCE = "src/lightrft_ddp/backend.py"
SETTINGS = [
    *("--model", "tiny", "--task", "copy", "--reward", "support:varied", "--steps", "3", "--max-new-tokens", "4"),
    *("--train-batch-size", "16", "--micro-train-batch-size", "4", "--n-samples-per-prompt", "4", "--eval-every", "0"),
    *("--actor-learning-rate", "1e-3", "--lr-warmup-ratio", "0", "--eval-limit", "8", "--quiet"),
]


def quotes() -> list[tuple[str, str]]:
    """The file and the text of each quotation, in order."""
    return re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```$', PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def lines_of(text: str) -> list[str]:
    """Those that are not blank: a quotation may end anywhere between two."""
    return [line for line in text.splitlines() if line.strip()]


def test_the_page_quotes_what_is_there() -> None:
    found = quotes()
    assert len(found) == PAGE.read_text().count("\n```") // 2, "a block of code does not say what it is quoted from"
    for name, text in found:
        assert text in (PACKAGE / name).read_text(), f"{name} does not hold:\n{text}"


def test_the_page_quotes_the_whole_backend_in_its_order() -> None:
    quoted = [line for name, text in quotes() if name == SOURCE for line in lines_of(text)]
    assert quoted == lines_of((PACKAGE / SOURCE).read_text())


def test_what_the_page_and_the_readme_link_to_is_there() -> None:
    for page in (PAGE, PACKAGE / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_it_is_small() -> None:
    assert sum(len(file.read_text().splitlines()) for file in (PACKAGE / "src").rglob("*.py")) < 200


def run(words: Sequence[str | Path], cwd: Path, environ: Mapping[str, str] | None = None) -> str:
    """What it wrote. Raises where it fails."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    clean |= {"OMP_NUM_THREADS": "1", **(environ or {})}
    ended = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, f"{words}:\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


@pytest.mark.backends
def test_its_own_suite_passes(tmp_path: Path) -> None:
    copy = a_copy(tmp_path)
    path = os.pathsep.join([str(ROOT / "src"), str(copy / "src")])
    assert "2 passed" in run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], copy, {"PYTHONPATH": path})


def a_copy(directory: Path) -> Path:
    """What its author has, without what tools have left there."""
    ours = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(PACKAGE, directory / "example-backend", ignore=ours))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with lightrft and the backend as wheels leave them; the libraries are this one's."""
    directory = tmp_path_factory.mktemp("downstream")
    venv.create(directory / "venv", symlinks=True)
    python = directory / "venv" / "bin" / "python"
    purelib = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], directory).strip())
    (purelib / "libraries.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    shutil.copytree(ROOT / "src" / "lightrft", purelib / "lightrft", ignore=shutil.ignore_patterns("__pycache__"))
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    run([*pip, "--no-build-isolation", a_copy(directory)], directory)
    return python


@pytest.mark.slow
def test_it_is_found_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    lookup = """
from lightrft import get_strategy
strategy = get_strategy({"backend": "ddp"})
import lightrft, lightrft_ddp
print(strategy.name, lightrft.__file__, lightrft_ddp.__file__)
"""
    name, *files = run([installed, "-c", lookup], tmp_path).split()
    assert name == "ddp"
    assert all(Path(file).is_relative_to(installed.parents[1]) for file in files)


@pytest.mark.slow
def test_it_type_checks_where_our_stubs_are_not(installed: Path, tmp_path: Path) -> None:
    copy = a_copy(tmp_path)
    mypy: list[str | Path] = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        installed,
        "--cache-dir",
        tmp_path / "cache",
    ]
    assert "no issues found in 4 source files" in run(mypy, copy)
    source = copy / SOURCE
    source.write_text(source.read_text().replace("bind(wait_for_ranks, run)", "bind(wait_for_ranks, run.world)"))
    with pytest.raises(AssertionError, match='"bind" has incompatible type'):
        run(mypy, copy)


@pytest.mark.slow
def test_T6_installed_it_learns_on_two_ranks_what_one_process_learns(installed: Path, tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(ROOT / "tests")}  # the reward
    two_ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = []
    for backend, start in (("local", []), ("ddp", two_ranks)):
        words = ["train", *SETTINGS, "--backend", backend, "--output", backend]
        run([installed, *start, "-m", "lightrft", *words], tmp_path, environ)
        ended.append(load_file(tmp_path / backend / "checkpoints" / "step3" / "model.safetensors"))
    assert ended[0].keys() == ended[1].keys()
    assert max(float((ended[0][name] - ended[1][name]).abs().max()) for name in ended[0]) <= 5e-5
