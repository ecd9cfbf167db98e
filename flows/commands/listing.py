"""Rows under column names, and how commands print them: as a table, as JSON or as CSV.

A table on a terminal has the terminal's width, and becomes a list if its columns do not fit. In a pipe nothing is cut, and a
table that is too wide for any screen becomes JSON, a line a row.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from millrace.core.plain_text import PlainConsole, printable, printable_json
from millrace.flows.commands.terminal import console

FORMULA = ("=", "+", "-", "@", "\t")  # first characters of cells that a spreadsheet computes
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
UNLIMITED = 1_000_000  # columns
WIDEST = 400  # columns of a table in a pipe
LONGEST = 200  # characters of a cell on a terminal
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, with every value whole.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV, with every value whole.")]
NewestOption = Annotated[
    int, typer.Option("--newest", min=0, help="Rows of the table, the newest ones; 0 for all.")
]
NEWEST = 100  # rows by default: a table of thousands takes seconds to lay out, and nobody reads it


@dataclass(frozen=True)
class Listing:
    """Values by column. `facts`: shown once, before the rows."""

    columns: Sequence[str]
    rows: list[Sequence[Any]]
    facts: dict[str, str] = field(default_factory=dict)

    def newest(self, rows: int) -> Listing:
        """The last `rows` rows, with a fact about the number of earlier ones; 0 for all."""
        before = len(self.rows) - rows
        if not rows or before <= 0:
            return self
        facts = {**self.facts, "not shown": f"{before} rows before these: --newest 0 shows all"}
        return replace(self, rows=self.rows[-rows:], facts=facts)

    def as_json(self) -> str:
        """A list with an object a row; with facts, an object of the facts, and that list as `rows`."""
        rows = [dict(zip(self.columns, map(_plain, row), strict=True)) for row in self.rows]
        content: Any = {**self.facts, "rows": rows} if self.facts else rows
        return printable_json(content, indent=1, default=str)

    def as_json_lines(self) -> str:
        """An object a row, each on its line."""
        rows = (dict(zip(self.columns, map(_plain, row), strict=True)) for row in self.rows)
        return "".join(f"{printable_json(row, default=str)}\n" for row in rows)

    def as_csv(self) -> str:
        """A header, then a line a row; null is empty. Texts are printable, and spreadsheets compute none of them."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(_cell, self.columns))
        writer.writerows(map(_cell, row) for row in self.rows)
        return text.getvalue()


def _cell(value: Any) -> Any:
    """A value for CSV. A text that a spreadsheet would compute gets an apostrophe before it, as a user would type it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = printable(str(value))
    return f"'{text}" if text.startswith(FORMULA) and not NUMBER.fullmatch(text) else text


def _plain(value: Any) -> Any:
    """A value for JSON, where numbers are finite and keys are text."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_listing(listing: Listing, as_json: bool, as_csv: bool, newest: int = 0) -> None:
    """Print a listing in the form that was asked for. newest: rows of a table, 0 for all; JSON and CSV have all."""
    if as_json and as_csv:
        raise typer.BadParameter("give --json or --csv")
    if as_json or as_csv:
        sys.stdout.write(f"{listing.as_json()}\n" if as_json else listing.as_csv())
        return
    shown = listing.newest(newest)
    if console.is_terminal:
        _print_table(shown, console, LONGEST)
    else:
        _print_table(shown, PlainConsole(file=console.file, width=UNLIMITED), None)


def _print_table(listing: Listing, out: PlainConsole, longest: int | None) -> None:
    """longest: characters of a cell; None for all."""
    if listing.facts:
        facts = Table(show_header=False, box=None, pad_edge=False)
        facts.add_column(no_wrap=True)
        facts.add_column(overflow="fold")
        for name, value in listing.facts.items():
            facts.add_row(name, Text(printable(value)))
        out.print(facts)
    cells = [[_shown(value, longest) for value in row] for row in listing.rows]
    table = Table()
    for column in listing.columns:
        table.add_column(Text(printable(column)), overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    needed = Measurement.get(out, out.options.update(max_width=UNLIMITED), table)
    if longest is None and needed.maximum > WIDEST:
        out.file.write(listing.as_json_lines())
    elif cells and needed.minimum > out.width:
        _print_records(listing, cells, out)
    else:
        out.print(table)


def _print_records(listing: Listing, cells: list[list[str]], out: PlainConsole) -> None:
    """A line a value, for rows that are wider than the terminal."""
    for number, row in enumerate(cells, 1):
        record = Table(
            title=f"row {number}", title_justify="left", show_header=False, box=None, pad_edge=False
        )
        record.add_column(no_wrap=True, style="dim")
        record.add_column(overflow="fold")
        for column, value in zip(listing.columns, row, strict=True):
            record.add_row(Text(printable(column)), Text(value))
        out.print(record)


def _shown(value: Any, longest: int | None) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else printable(str(value))
    return text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…"
