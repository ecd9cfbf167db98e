"""Rows under column names: the output of commands that show runs. Written as JSON or CSV here, as a table in flows/commands."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.core.plain_text import printable, printable_json

FORMULA = ("=", "+", "-", "@", "\t")  # first characters of cells that a spreadsheet computes
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


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
