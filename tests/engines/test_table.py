"""docs/engines.md says of each engine what it says itself."""

from __future__ import annotations

from pathlib import Path

from attrs import fields

from lightrft.conformance.parity import qwen2
from lightrft.engines.hf import hf, hf_copy
from lightrft.engines.protocol import Capabilities
from lightrft.engines.scripted import scripted
from lightrft.engines.table import HEADINGS, heading, line

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


def test_every_capability_has_a_heading() -> None:
    assert [each.name for each in fields(Capabilities)] == list(HEADINGS)
    assert heading() in PAGE


def test_the_lines_are_the_engines() -> None:
    model = qwen2()
    assert line("`hf`", hf(model, processor=object()).capabilities) in PAGE
    assert line("`hf`, a copy", hf_copy(model, processor=object()).capabilities) in PAGE
    assert line("`scripted`", scripted().capabilities) in PAGE
