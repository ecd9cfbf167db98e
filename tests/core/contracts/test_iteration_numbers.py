"""Iterations count from 1 in every message: no code shows people an index.

A message that says `iteration {...}` gets its number from `iteration_number`. "after iteration N" and "after N iterations"
count iterations that are done, which is the same number. Assertions speak to developers and are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import millrace

ROOT = Path(millrace.__file__).resolve().parents[2]
SOURCES = sorted(
    file for room in ("core", "connectors", "tasks", "flows") for file in (ROOT / room).rglob("*.py")
)
SHOWS = re.compile(r"(?<!after )\b[Ii]teration $")
LOGS = re.compile(r"(?<!after )\b[Ii]teration %[ds]")


def shown_indices(source: str) -> Iterator[str]:
    """Expressions that stand after "iteration " in a message and are not numbers of iteration_number."""
    for node in _outside_assertions(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    text += str(part.value)
                elif isinstance(part, ast.FormattedValue):
                    if SHOWS.search(text) and not _is_number(part.value):
                        yield ast.unparse(part.value)
                    text += "x"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            template = str(node.args[0].value)
            for match in LOGS.finditer(template):
                position = len(re.findall(r"%[a-z]", template[: match.end()]))
                if not _is_number(node.args[position]):
                    yield ast.unparse(node.args[position])


def _outside_assertions(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assert):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_assertions(child)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("iteration_number")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ('f"iteration {ctx.index}: x"', ["ctx.index"]),
        ('f"{url}: Iteration {i} of {n}"', ["i"]),
        ('f"samples of iteration {iteration_number(i)}"', []),
        ('f"no checkpoint after iteration {at}"', []),
        ('f"iterations/{index:06d}"', []),
        ('log.info("run %s: iteration %d was committed", run, index)', ["index"]),
        ('log.info("run %s: iteration %d", run, ids.iteration_number(index))', []),
        ('assert x, f"iteration {index} is next"', []),
    ],
)
def test_an_index_in_a_message_is_noticed(source: str, shown: list[str]) -> None:
    assert list(shown_indices(source)) == shown


def test_no_message_shows_an_index() -> None:
    shown = [
        f"{file.relative_to(ROOT)}: {each}" for file in SOURCES for each in shown_indices(file.read_text())
    ]
    assert not shown, "show iteration_number(index) instead:\n" + "\n".join(shown)
