"""Fields that a preset sets. They are empty in the JSON schema that forms are made from. Knows no section and no preset.

A form submits every default of its schema, and a submitted value overrides the preset. So these fields have no default
there. `null` stands for the preset's value. If null is a valid value, a form omits the field until the user fills it.
`merged` puts values over values, section by section.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from millrace.core.config.parts.menu import menu_of, spelled_out, variant_of
from millrace.core.config.parts.section import models

THE_PRESETS = "the preset's"  # in forms and on the reference page
NONE = "none"  # null in words, for a section


@dataclass(frozen=True)
class FromPreset:
    """Annotation of a field that some preset sets."""


FROM_PRESET = FromPreset()


def is_from_preset(field: FieldInfo) -> bool:
    """Whether some preset sets the field."""
    return FROM_PRESET in field.metadata


def given_values(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The values of a section, and of those below it, without values that stand for the preset's. Choices are mappings."""
    given = {}
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is not None and is_from_preset(field):
            if value is None and not _null_is_a_value(field):
                continue
            if value == NONE and _null_is_a_value(field) and models(field.annotation):
                value = None
        if field is not None:
            variant = variant_of(field, value) if menu_of(field) else None
            value = spelled_out(value) if variant else value
            section = variant or next(iter(models(field.annotation)), None)
            if section and isinstance(value, Mapping):
                value = given_values(value, section)
        given[name] = value
    return given


def _empty_fields(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Remove the defaults of preset fields, and of sections that hold such fields, from a section's JSON schema."""
    properties = schema["properties"]
    for name, field in model.model_fields.items():
        if is_from_preset(field):
            properties[name] = _empty(properties[name], field)
        elif any(_holds(below) for below in models(field.annotation)):
            properties[name].pop("default")


EMPTY_IN_FORMS = ConfigDict(
    json_schema_extra=_empty_fields
)  # for every section with such fields, in it or below


def _empty(prop: Mapping[str, Any], field: FieldInfo) -> dict[str, Any]:
    about = {key: prop[key] for key in ("title", "description") if key in prop}
    rest = {key: item for key, item in prop.items() if key not in (*about, "default", "anyOf")}
    options = prop.get("anyOf", [rest])
    if not _null_is_a_value(field):
        return {**about, "anyOf": [{"type": "null", "title": THE_PRESETS}, *options], "default": None}
    about["description"] = f"{prop['description']} Left empty: {THE_PRESETS}."
    # a form shows the first variant, and would submit a section with its defaults
    if models(field.annotation):
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
