"""docs/configuration.md, made from the models: `python -m core.config.reference`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from core.config.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

Every field, made from the models by `make docs`. A configuration is a YAML file of these sections; on the command line a field is
set by its path, as in `trainer.optimizer.lr=1e-6` or `data.sources.0.path=/data/a.jsonl`. Unknown keys are errors. The Prefect deployment's one parameter
is the same model.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_section("", RunConfig)]).rstrip() + "\n"


def _section(path: str, model: type[BaseModel]) -> Iterator[str]:
    inner: list[tuple[str, type[BaseModel]]] = []
    rows: list[str] = []
    for name, field in model.model_fields.items():
        where = f"{path}.{name}" if path else name
        nested = _model_of(field.annotation)
        if nested is not None:
            inner.append((f"{where}.N" if get_origin(field.annotation) is list else where, nested))
        if nested is None or get_origin(field.annotation) is list:
            rows.append(
                f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {field.description}{_bounds(field)} |"
            )
    if path:
        yield f"## {path}\n\n{(model.__doc__ or '').strip().splitlines()[0]}\n"
    if rows:
        yield "| field | type | default | meaning |\n|---|---|---|---|"
        yield from rows
        yield ""
    for where, nested in inner:
        yield from _section(where, nested)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in inner)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is list:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return f"{len(inner)} × {_type(inner[0])}"
    if annotation is type(None):
        return "null"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    return names.get(annotation.__name__, str(annotation.__name__))


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`" if default != "" else "empty"


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    return f" ({', '.join(found)})" if found else ""


if __name__ == "__main__":
    PAGE.write_text(page())
