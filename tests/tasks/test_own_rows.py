"""Nulls in rows that a function makes: its own stay, those of a data set of the package `datasets` are a table's."""

from __future__ import annotations

import pytest

from millrace.core.config import UserFunction
from millrace.core.config.data import Source
from millrace.core.contracts.rows.prompts import PromptRow
from millrace.tasks.data.own_rows import OwnRows


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("data_set", [{"sum": 7}, {"parts": [1, None]}]),
        ("listed", [{"sum": 7, "parts": None}, {"sum": None, "parts": [1, None]}]),
    ],
)
def test_nulls_are_left_out_of_the_rows_of_a_table_alone(name: str, labels: list[object]) -> None:
    rows = OwnRows(Source(rows=UserFunction(function=f"tests.support.table_rows:{name}")))
    try:
        found = rows.read(None, [0, 1])
    finally:
        rows.close()
    assert [row.label for row in found if isinstance(row, PromptRow)] == labels
    assert [row.metadata for row in found if isinstance(row, PromptRow)] == [{}, {"level": 1}]
