"""docs/laws.md is what the suite checks."""

from __future__ import annotations

import re
from pathlib import Path

from lightrft.conformance.engines import ENGINE_LAWS
from lightrft.conformance.laws import LAWS
from lightrft.conformance.page import law_page
from lightrft.conformance.run import BESIDE_THE_LAWS
from lightrft.conformance.statements import SECTIONS

ROOT = Path(__file__).parents[2]
NAMES = [*BESIDE_THE_LAWS, *(law.name for law in LAWS), *(law.name for law in ENGINE_LAWS)]
STATEMENTS = {number for section in SECTIONS for number in section.statements}


def test_the_page_is_generated() -> None:
    again = "python -m lightrft.conformance.page > docs/laws.md"
    assert (ROOT / "docs" / "laws.md").read_text() == law_page(), f"write it again: {again}"


def test_every_law_of_the_suite_is_about_a_statement() -> None:
    for name in NAMES:
        numbers = name.partition(":")[0].split()
        assert numbers, name
        assert numbers[0] in STATEMENTS, name
        assert all(number in STATEMENTS or re.fullmatch(r"FC\d\d", number) for number in numbers), name
    assert len(set(NAMES)) == len(NAMES)


def test_statements_that_the_suite_does_not_check_have_tests_of_their_own() -> None:
    checked = {number for name in NAMES for number in name.partition(":")[0].split()}
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert [n for n in sorted(STATEMENTS - checked) if not re.search(rf"_{n}_|\b{n}: ", tests)] == []
