"""docs/laws.md: ``python -m lightrft.conformance.page > docs/laws.md`` writes it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable

from attrs import fields

from lightrft.conformance.engines import ENGINE_LAWS
from lightrft.conformance.laws import LAWS
from lightrft.conformance.run import BESIDE_THE_LAWS
from lightrft.conformance.statements import INTRODUCTION, SECTIONS
from lightrft.strategy.config import StrategyConfig

WIDTH = 120


def law_page() -> str:
    """The statements, each with the laws of the suite that check it, and the fields of the configuration."""
    parts = ["# The laws", wrapped(INTRODUCTION)]
    for section in SECTIONS:
        parts.append(f"## {section.title} ({section.letter})")
        parts.append("\n".join(item(number, text) for number, text in section.statements.items()))
    parts += ["## Configuration fields (name = default)", wrapped(" ".join(defaults()))]
    return "\n\n".join(parts) + "\n"


def item(number: str, text: str) -> str:
    """A statement and what checks it."""
    backends = checks(number, [*BESIDE_THE_LAWS, *(law.name for law in LAWS)])
    engines = checks(number, [law.name for law in ENGINE_LAWS])
    told = [wrapped(f"- **{number}** {text}", "  ")]
    told += [wrapped(f"  *On every backend:* {'; '.join(backends)}.", "  ")] if backends else []
    told += [wrapped(f"  *On every engine:* {'; '.join(engines)}.", "  ")] if engines else []
    told += [] if backends or engines else ["  *In the package's own tests.*"]
    # Two spaces before the end of a line begin a new one in Markdown.
    return "  \n".join(told)


def checks(number: str, names: Iterable[str]) -> list[str]:
    """What the laws of that number say, with their field cases."""
    found = []
    for name in names:
        numbers, _, says = name.partition(": ")
        if number in numbers.split():
            others = [other for other in numbers.split() if other != number]
            found.append(says + (f" ({', '.join(others)})" if others else ""))
    return found


def wrapped(text: str, indent: str = "") -> str:
    """Lines of at most 120 characters."""
    lead = text[: len(text) - len(text.lstrip(" "))] if indent else ""
    return textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent=lead, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def defaults() -> list[str]:
    """Every field with its default, in the order of the class."""
    return [f"`{each.name}={each.default!r}`" for each in fields(StrategyConfig) if not each.name.startswith("_")]


if __name__ == "__main__":
    sys.stdout.write(law_page())
