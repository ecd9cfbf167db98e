"""Every field is described, read by some code, and on the reference page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from millrace.core.config.docs_page import PAGE, page
from millrace.core.config.findings import all_fields, models
from millrace.core.config.run import RunConfig

ROOT = Path(__file__).parents[3]


def sections(model: type[BaseModel] = RunConfig) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for below in models(field.annotation):
            yield from sections(below)


def reads() -> set[str]:
    """Names of attributes that code outside the check and the models reads."""
    found: set[str] = set()
    for package in ("core", "connectors", "tasks", "flows"):
        for file in (ROOT / package).rglob("*.py"):
            if (
                file.is_relative_to(ROOT / "core" / "config")
                or file.is_relative_to(ROOT / "flows")
                and file.name.startswith("check")
            ):
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            }
    return found


IN_CORE_CONFIG = {
    "algorithm.preset",  # the other fields are filled from it
    "placement.offload_engines",  # RunConfig.engines_sleep
    "placement.offload_trainer",  # RunConfig.trainer_offloads
}


@pytest.mark.parametrize("path", [path for path in all_fields() if path not in IN_CORE_CONFIG])
def test_every_field_is_described_and_read(path: str, read: set[str]) -> None:
    field = all_fields()[path]
    assert field.description or models(field.annotation), f"{path} has no description"
    assert path.rsplit(".", 1)[-1] in read, f"no code reads {path}"


@pytest.fixture(scope="module")
def read() -> set[str]:
    return reads()


@pytest.mark.parametrize("model", list(sections()), ids=lambda model: model.__name__)
def test_every_section_says_what_it_is(model: type[BaseModel]) -> None:
    assert model.__doc__
    assert model.model_config.get("extra") == "forbid"
    assert model.model_config.get("frozen")


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m millrace.core.config.docs_page"


def test_links_of_the_page_lead_somewhere() -> None:
    text = page()
    headings = {
        re.sub(r"[^\w-]", "", line[3:].lower()) for line in text.splitlines() if line.startswith("## ")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
