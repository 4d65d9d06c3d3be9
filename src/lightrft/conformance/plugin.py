"""The options of ``pytest --pyargs lightrft.conformance --strategy mypackage:build --world 2 --xfails file``.

pytest loads this wherever lightrft is installed, so it imports nothing; the tests are in ``test_strategy``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is checked, and how."""
    group = parser.getgroup("lightrft", "conformance of a training strategy: --pyargs lightrft.conformance")
    group.addoption("--strategy", action="append", help="a backend's name, or package.module:build; may be repeated")
    group.addoption("--world", type=int, nargs="+", default=[1], help="numbers of ranks (default: 1)")
    group.addoption("--xfails", type=Path, help="laws known to be broken, each with a # and the reason, one a line")
    group.addoption(
        "--lacking", nargs="+", default=[], help="what the backend does not have: bf16, checkpoints, engine"
    )
    group.addoption(
        "--laws-profile", default="quick", choices=["quick", "ci", "nightly"], help="how many examples (default: quick)"
    )
