"""Fields that a preset sets: empty in the JSON schema that forms are made from. Knows no section and no preset.

A form submits every default that its schema has, and what is given overrides the preset. So these fields have none there.
`null` stands for the preset's value. Where null is a value of its own, a form leaves the field out until somebody fills it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from millrace.core.config.parts.menu import menu_of, spelled_out, variant_of
from millrace.core.config.parts.section import models

THE_PRESETS = "the preset's"  # in forms and on the reference page
NONE = "none"  # null in words, of a section


@dataclass(frozen=True)
class FromPreset:
    """Annotation of a field that some preset sets."""


FROM_PRESET = FromPreset()


def is_from_preset(field: FieldInfo) -> bool:
    """Whether some preset sets the field."""
    return FROM_PRESET in field.metadata


def given_values(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The values of a section without those that stand for the preset's, in its choices too."""
    given = {}
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is not None and is_from_preset(field):
            if value is None and not _null_is_a_value(field):
                continue
            if value == NONE and _null_is_a_value(field) and models(field.annotation):
                value = None
            variant = variant_of(field, value) if menu_of(field) else None
            value = spelled_out(value) if variant else value
            if variant and isinstance(value, Mapping):
                value = given_values(value, variant)
        given[name] = value
    return given


def _empty_fields(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Take the defaults of fields of presets out of a section's JSON schema, and those of what holds such fields."""
    properties = schema["properties"]
    for name, field in model.model_fields.items():
        if is_from_preset(field):
            properties[name] = _empty(properties[name], field)
        elif any(_holds(below) for below in models(field.annotation)):
            properties[name].pop("default")


EMPTY_IN_FORMS = ConfigDict(json_schema_extra=_empty_fields)  # of every section that has or holds such fields


def _empty(prop: Mapping[str, Any], field: FieldInfo) -> dict[str, Any]:
    about = {key: prop[key] for key in ("title", "description") if key in prop}
    rest = {key: item for key, item in prop.items() if key not in (*about, "default", "anyOf")}
    options = prop.get("anyOf", [rest])
    if not _null_is_a_value(field):
        return {**about, "anyOf": [{"type": "null", "title": THE_PRESETS}, *options], "default": None}
    about["description"] = f"{prop['description']} Left empty: {THE_PRESETS}."
    if models(field.annotation):  # a form shows the first, and would submit a section with its defaults
        options = [{"type": "string", "enum": [NONE], "title": NONE}, *options]
    return {**about, "anyOf": options}


def _null_is_a_value(field: FieldInfo) -> bool:
    return NoneType in get_args(field.annotation)


def _holds(model: type[BaseModel]) -> bool:
    """Whether a section, or one below it, has a field that a preset sets."""
    return any(
        is_from_preset(field) or any(_holds(below) for below in models(field.annotation))
        for field in model.model_fields.values()
    )
