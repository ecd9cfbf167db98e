"""Every field is described, read by some code, and on the reference page."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.core.config.parts.menu import Menu, menu_of, variants
from millrace.core.config.parts.section import models
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.config.reading.findings import all_fields
from millrace.core.config.run_config import RunConfig
from tests.support.configuration_page import PAGE, page

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
    "model.preset",  # the fields of its layout are filled from it
    "trainer.parallel.expert_tensor",  # Parallel.tensor_of_experts
    "checkpoint.background",  # RunConfig.saves_in_background
    "evaluation.background",  # RunConfig.evaluates_in_background
    "pipeline.eager_groups",  # Pipeline.chunk_groups
    "pipeline.max_staleness",  # Pipeline.staleness
    "placement.offload_engines",  # RunConfig.engines_sleep
    "placement.offload_trainer",  # RunConfig.trainer_offloads
    *(  # Sampling.request
        f"{place}.sampling.{name}"
        for place in ("rollout", "evaluation.sets[]")
        for name in ("json_schema", "regex", "ebnf")
    ),
}


def choices() -> dict[str, FieldInfo]:
    """The fields that are choices between variants, by path."""
    return {path: field for path, field in all_fields().items() if menu_of(field)}


IN_MENUS = {f"{path}.kind" for path in choices()}


@pytest.mark.parametrize("path", [path for path in all_fields() if path not in IN_CORE_CONFIG | IN_MENUS])
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


@pytest.mark.parametrize("path", choices())
def test_the_menu_of_a_choice_names_every_kind(path: str) -> None:
    menu = menu_of(choices()[path])
    assert isinstance(menu, Menu)
    kinds = variants(choices()[path])
    assert re.findall(r"^ *- `(\w+)` — ", menu.text, re.MULTILINE) == list(kinds)
    assert menu.default in kinds
    assert choices()[path].default == kinds[menu.default]()


def test_choices_and_functions_are_these() -> None:
    assert list(choices()) == ["algorithm.advantage", "algorithm.loss", "engines", "sync"]
    functions = [path for path, field in all_fields().items() if UserFunction in models(field.annotation)]
    assert functions == [
        "run.prepare",
        "data.sources[].rows",
        "rollout.session.function",
        "rollout.session.environment",
        "rollout.buffer.buffer_filter",
        "filter.group_filter",
        "algorithm.shaping",
        "algorithm.teacher_server.hint",
    ]


def test_the_json_schema_takes_the_short_forms_and_has_literal_defaults() -> None:
    schema = RunConfig.model_json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    least = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"sources": [{"path": "p"}]}}
    for more in (
        {},
        {"engines": {"count": 2}, "sync": "disk", "algorithm": {"loss": "gspo", "shaping": "a.b:c"}},
        {
            "engines": {"kind": "external", "addresses": ["http://a:1"]},
            "run": {"name": "a", "prepare": "a:b"},
        },
        RunConfig.model_validate(least).model_dump(mode="json"),
    ):
        assert list(validator.iter_errors({**least, **more})) == []
    for wrong in (
        {"engines": {"kind": "sglang", "threads": 1}},
        {"algorithm": {"loss": "function"}},
        {"sync": "x"},
    ):
        assert list(validator.iter_errors({**least, **wrong})) != []
    assert json.loads(json.dumps(schema["properties"]["sync"]["default"]))["kind"] == "auto"


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.support.configuration_page"


def test_links_of_the_page_lead_somewhere() -> None:
    text = page()
    headings = {
        re.sub(r"[^\w-]", "", line[3:].lower()) for line in text.splitlines() if line.startswith("## ")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
