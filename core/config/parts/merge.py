"""Values over values, section by section. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from millrace.core.config.parts.menu import menu_of, variant_of
from millrace.core.config.parts.section import models


def merged(below: Mapping[str, Any], above: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """`above` over `below`, both values of `model`.

    Lists and mappings of options are replaced whole, and so is a variant of another `kind`: its fields would not fit.
    """
    result = dict(below)
    for name, value in above.items():
        old, section = result.get(name), _section(model, name, value)
        if (
            section is None
            or not isinstance(old, Mapping)
            or not isinstance(value, Mapping)
            or menu_of(model.model_fields[name])
            and value.get("kind", old.get("kind")) != old.get("kind")
        ):
            result[name] = value
        else:
            result[name] = merged(old, value, section)
    return result


def _section(model: type[BaseModel], name: str, value: Any) -> type[BaseModel] | None:
    field = model.model_fields.get(name)
    if field is None:
        return None
    menu = menu_of(field)
    if menu:
        return variant_of(field, value) or models(field.annotation)[0]
    return next(iter(models(field.annotation)), None)
