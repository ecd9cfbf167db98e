"""What the form of a deployment on Prefect's page submits when its user touches nothing: values made from a JSON schema.

Follows both pages of Prefect 3. Where a schema has a default, the default is submitted. A section without one is
submitted with the values of its fields. Of a field with several types, the one that fits the default is shown, else the
first. A `null` type submits null. Any other field without a default is left out; the older page submits false for a
switch without one.
"""

from __future__ import annotations

from typing import Any

MISSING = object()


def untouched(schema: dict[str, Any]) -> dict[str, Any]:
    """The values that a form made from this schema submits untouched; required fields without a default are left out."""
    values = _value(schema, schema, MISSING)
    assert isinstance(values, dict)
    return values


def _value(schema: dict[str, Any], prop: dict[str, Any], value: Any) -> Any:
    """The value of a field; MISSING if it is left out. value: what the section above it holds."""
    prop = _resolved(schema, prop)
    if value is MISSING:
        value = prop.get("const", prop.get("default", MISSING))
    if "anyOf" in prop:
        options = [_resolved(schema, option) for option in prop["anyOf"]]
        chosen = options[_index(options, value)]
        return _value(schema, {name: item for name, item in chosen.items() if name != "default"}, value)
    kind = prop.get("type")
    if kind == "null":
        return None
    if kind == "boolean" and value is MISSING:
        return False
    if kind == "object" and prop.get("properties") and (value is MISSING or isinstance(value, dict)):
        held = {} if value is MISSING else value
        fields = {
            name: _value(schema, field, held.get(name, MISSING)) for name, field in prop["properties"].items()
        }
        return {name: field for name, field in fields.items() if field is not MISSING}
    return value


def _resolved(schema: dict[str, Any], prop: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in prop:
        return prop
    definition: dict[str, Any] = schema["$defs"][prop["$ref"].rpartition("/")[2]]
    return {**definition, **{name: item for name, item in prop.items() if name != "$ref"}}


def _index(options: list[dict[str, Any]], value: Any) -> int:
    """Which of a field's types is shown."""
    if value is MISSING:
        return 0
    if isinstance(value, dict) and value:
        common = [len(set(value) & set(option.get("properties") or {})) for option in options]
        return common.index(max(common))
    types = {
        bool: ("boolean",),
        int: ("integer", "number"),
        float: ("number", "integer"),
        str: ("string",),
        list: ("array",),
        dict: ("object",),
        type(None): ("null",),
    }[type(value)]
    return next((at for at, option in enumerate(options) if option.get("type") in types), 0)
