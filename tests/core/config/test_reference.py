"""The configuration's surface: described, documented, and read by somebody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from core.config.reference import PAGE, _model_of, page
from core.config.run import RunConfig

ROOT = Path(__file__).parents[3]


def fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in model.model_fields.items():
        nested = _model_of(field.annotation)
        if nested is None:
            yield f"{path}{name}", field.description
        else:
            yield from fields(nested, f"{path}{name}.")


def test_the_page_is_what_the_models_say() -> None:
    assert PAGE.read_text() == page(), "docs/configuration.md is old: run `make docs`"


@pytest.mark.parametrize(("path", "description"), list(fields(RunConfig)), ids=lambda value: str(value)[:40])
def test_every_field_says_what_it_means(path: str, description: str | None) -> None:
    assert description, path
    assert description.endswith("."), path


def test_every_field_is_read_by_the_code() -> None:
    files = [
        path for layer in ("core", "connectors", "tasks", "flows") for path in (ROOT / layer).rglob("*.py")
    ]
    code = "\n".join(
        path.read_text() for path in files if path.parent.name != "config" or path.name == "run.py"
    )
    code += (ROOT / "core/config/algorithm.py").read_text()  # presets fill in what stands there
    unread = [
        path for path, _ in fields(RunConfig) if not re.search(rf"[.\"]{path.rsplit('.', 1)[-1]}\b", code)
    ]
    assert unread == []
