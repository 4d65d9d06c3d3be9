"""The documents' Python is run, in order, with what their text supposes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightrft import get_fake_strategy

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "design.md",
    ROOT / "docs" / "backends.md",
    ROOT / "docs" / "checkpoints.md",
    ROOT / "docs" / "engines.md",
    ROOT / "docs" / "conformance.md",
    ROOT / "docs" / "typing.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    names = {
        "torch": torch,
        "strategy": get_fake_strategy(),
        "batches": [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(4)],
    }
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def test_what_the_readme_links_to_is_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_makefile_has_every_target_that_the_documents_name() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"
