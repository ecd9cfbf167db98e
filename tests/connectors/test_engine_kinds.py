"""Each kind of engine is described, started and called; and no other module asks for its name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from millrace.connectors.engines.kinds import CONNECT, LAUNCH
from millrace.core.config.engines import Engines

SECTIONS = get_args(get_args(Engines)[0])
NAMES = {kind.name for section in SECTIONS for kind in section.kinds}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_kind_that_a_section_may_be_is_called_alike_and_started_if_it_is_ours(section: type) -> None:
    kinds = section.kinds  # type: ignore[attr-defined]
    assert len({CONNECT[kind.name] for kind in kinds}) == 1
    assert {kind.name for kind in kinds if kind.started} <= LAUNCH.keys()
    for kind in kinds:
        read = {field.removeprefix("engines.") for field in kind.fields.split()}
        assert read <= section.model_fields.keys()  # type: ignore[attr-defined]


def test_no_kind_is_started_or_called_that_no_section_names() -> None:
    assert CONNECT.keys() == NAMES
    assert LAUNCH.keys() < NAMES


def test_no_module_compares_the_name_of_a_kind_of_engine() -> None:
    found = []
    for folder in ("core", "connectors", "tasks", "flows"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if ".kind" in text and any(name in text for name in NAMES):
                compared = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Compare)]
                found += [f"{path}:{node.lineno}" for node in compared if _asks_the_kind(node)]
    assert not found


def _asks_the_kind(node: ast.Compare) -> bool:
    inside = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
    named = any(isinstance(part, ast.Constant) and part.value in NAMES for part in inside)
    return named and any(isinstance(part, ast.Attribute) and part.attr == "kind" for part in inside)
