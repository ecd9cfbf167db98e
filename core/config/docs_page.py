"""docs/configuration.md, made from the models: `python -m millrace.core.config.docs_page` writes it.

Owns the page's form; every word about a field stands with the field.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from millrace.core.config.findings import models
from millrace.core.config.run import RunConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

<!-- written by `python -m millrace.core.config.docs_page`; change the models in core/config instead -->

A run is one YAML file and `key=value` overrides behind it on the command line:

```
millrace check run.yaml                                   # touch all that it names, print the plan
millrace train run.yaml run.name=b trainer.optimizer.lr=1e-6
millrace train run.yaml data.sources.0.weight=2           # an item of a list by its number
millrace train run.yaml evaluation.sets.held_out.samples_per_prompt=4   # or by its name
```

Unknown keys are errors, and so are fields that contradict each other; all problems are shown at once, each with field,
value and remedy. Secrets stand in the environment, never here. Fields that a preset of `algorithm` changes are in
[algorithms.md](algorithms.md).

"""
BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "min_length": "at least {} long"}
PATTERNS = {
    r"^[a-z0-9][a-z0-9._-]{0,62}$": "lower-case name, 63 characters at most",
    r"^[A-Za-z0-9._-]+$": "name",
}


def page() -> str:
    """The whole page."""
    sections = [(name, models(field.annotation)[0]) for name, field in RunConfig.model_fields.items()]
    index = " · ".join(f"[{name}](#{name})" for name, _ in sections)
    return (
        HEAD + index + "\n\n" + "\n".join(text for name, model in sections for text in _section(name, model))
    )


def _section(path: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## {path}\n"
    yield f"{(model.__doc__ or '').strip()}\n"
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    below: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        nested = models(field.annotation)
        if nested:
            many = get_origin(field.annotation) is list
            below.append((f"{path}.{name}" + ("[]" if many else ""), nested[0]))
        yield _row(path, name, field, nested)
    yield ""
    for place, nested_model in below:
        yield from _section(place, nested_model)


def _row(path: str, name: str, field: FieldInfo, nested: list[type[BaseModel]]) -> str:
    meaning = field.description or ""
    if nested:
        place = f"{path}.{name}" + ("[]" if get_origin(field.annotation) is list else "")
        meaning = f"{meaning} See [{place}](#{_anchor(place)}).".strip()
        kind = "list" if place.endswith("[]") else "section"
    else:
        kind = ", ".join([_kind(field.annotation), *_bounds(field)])
    return f"| `{name}` | {kind} | {_default(field, bool(nested))} | {meaning} |".replace("\n", " ")


def _kind(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(_kind(part) for part in parts)
    if origin is list:
        return f"list of {_kind(parts[0])}"
    if origin is tuple:
        return f"{len(parts)} × {_kind(parts[0])}"
    if origin is dict:
        return "mapping"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null"}
    return names[annotation]


def _bounds(field: FieldInfo) -> Iterator[str]:
    for item in field.metadata:
        for name, form in BOUNDS.items():
            if getattr(item, name, None) is not None:
                yield form.format(getattr(item, name))
        pattern = getattr(item, "pattern", None)
        if pattern:
            yield PATTERNS.get(str(pattern), "`package.module:function`")


def _default(field: FieldInfo, nested: bool) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if nested:
        value = field.default
        if isinstance(value, BaseModel):
            given = value.model_dump(exclude_unset=True)
            return ", ".join(f"`{name}: {item}`" for name, item in given.items())
        return "none" if not value else str(value)
    if field.default is None:
        return "null"
    return f"`{_plain(field.default)}`"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _anchor(heading: str) -> str:
    return "".join(c for c in heading.lower() if c.isalnum() or c in "-_")


def main() -> None:
    """Write the page, or with --check say whether it is current."""
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        sys.exit(0 if current else f"{PAGE} is not current: run python -m millrace.core.config.docs_page")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
