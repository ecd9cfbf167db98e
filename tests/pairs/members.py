"""Everything that a configuration can switch on, from its own types: each needs a feature, or the reason why it is none.

A member is a field that is off by default (false, null, 0, empty), a value of a choice that is not the default, or the kind of
a section. Numbers and names that have a value by default switch nothing on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.core.config import RunConfig
from millrace.core.config.parts.menu import menu_of, variants
from millrace.core.config.parts.section import models

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})


def members() -> list[str]:
    """All of them, in the order of the sections, each once."""
    return list(dict.fromkeys(_members(RunConfig, "")))


def _members(model: type[BaseModel], above: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{above}{name}"
        menu = menu_of(field)
        if menu:
            kinds = variants(field)
            yield from (f"{path}.kind={kind}" for kind in kinds if kind != menu.default)
            for kind, section in kinds.items():
                yield from (m for m in _members(section, f"{path}.") if m != f"{path}.kind={kind}")
            continue
        yield from _of_field(path, field)
        inside = f"{path}.0." if get_origin(field.annotation) is list else f"{path}."
        for section in models(field.annotation):
            yield from _members(section, inside)


def _of_field(path: str, field: FieldInfo) -> Iterator[str]:
    choices, default = _choices(field.annotation), field.get_default(call_default_factory=False)
    if field.is_required():
        return
    if choices:
        yield from (f"{path}={choice}" for choice in choices if choice != default)
    elif default is True:
        yield f"{path}=False"
    elif (
        any(default is off or (type(default) is type(off) and default == off) for off in OFF)
        or default == 0.0
    ):
        yield path


def _choices(annotation: Any) -> list[Any]:
    """The values of a Literal, within lists and unions too."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in _choices(part)]
