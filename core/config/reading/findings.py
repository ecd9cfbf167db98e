"""Turns pydantic's errors into problems that name field, value and remedy. Pure."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.core.config.parts.menu import menu_of, variants
from millrace.core.config.parts.problems import Problem
from millrace.core.config.parts.section import NAME, models
from millrace.core.config.run_config import RunConfig
from millrace.core.contracts.references import WHOLE

# any other text may hold a secret
ITEM_NAME = re.compile(r"[A-Za-z0-9._-]+\Z")
IMPORT_PATH = "write it as package.module:function"
REASONS = {
    "literal_error": "not a choice",
    "string_pattern_mismatch": "does not have the form that it needs",
    "int_type": "not a whole number",
    "int_parsing": "not a whole number",
    "int_from_float": "not a whole number",
    "float_type": "not a number",
    "float_parsing": "not a number",
    "bool_type": "neither true nor false",
    "bool_parsing": "neither true nor false",
    "string_type": "not text",
    "list_type": "not a list",
    "too_short": "holds no item",
}
NAMES = {
    r"^[a-z0-9][a-z0-9._-]{0,62}$": "use lower-case letters, digits, dots, hyphens and underscores, 63 at most",
    NAME: "use letters, digits, dots, hyphens and underscores, and not dots alone",
    WHOLE: "export the secret under a name you choose and write ${env:NAME}, or ${prefect:BLOCK} for a Secret block of Prefect",
}


@dataclass(frozen=True)
class FieldPath:
    """The place of an error: its path without the kinds that pydantic adds, and the section that holds it."""

    parts: tuple[int | str, ...]
    section: type[BaseModel] | None  # None below a section's fields, in options
    choice: str = ""  # path of the choice whose variant the section is
    siblings: Mapping[str, type[BaseModel]] | None = None  # the choice's variants

    @property
    def path(self) -> str:
        """The dotted path."""
        return ".".join(str(part) for part in self.parts)

    @property
    def name(self) -> str:
        """The path's last part."""
        return str(self.parts[-1]) if self.parts else ""

    @property
    def field(self) -> FieldInfo | None:
        """The field, if the section has it."""
        return self.section.model_fields.get(self.name) if self.section else None


def place_of(loc: Sequence[int | str]) -> FieldPath:
    """The place of an item of ValidationError.errors() by its loc."""
    parts: list[int | str] = []
    section: type[BaseModel] | None = RunConfig
    choice, siblings = "", None
    rest = list(loc)
    while rest:
        part = rest.pop(0)
        parts.append(part)
        if isinstance(part, int) or not rest:
            continue
        field = section.model_fields.get(part) if section else None
        choice, siblings, section = "", None, None
        if field and menu_of(field):
            choice, siblings = ".".join(map(str, parts)), variants(field)
            section = siblings.get(str(rest.pop(0)))
            if not rest:
                break
        elif field:
            section = next(iter(models(field.annotation)), None)
            # pydantic adds an index and the section's tag
            if len(models(field.annotation)) > 1 and len(rest) > 1:
                parts.append(rest.pop(0))
                section = _tagged(models(field.annotation), str(rest.pop(0)))
    return FieldPath(tuple(parts), section, choice, siblings)


def _tagged(sections: Sequence[type[BaseModel]], tag: str) -> type[BaseModel]:
    """The section of a list of several kinds that has a field with the tag's name."""
    return next(section for section in sections if tag in section.model_fields)


def as_problem(item: Mapping[str, Any]) -> Problem:
    """Turn an item of ValidationError.errors() into a problem."""
    place, value, kind, context = (
        place_of(item["loc"]),
        item.get("input"),
        item["type"],
        item.get("ctx") or {},
    )
    field = place.path or "the configuration"
    if kind == "union_tag_invalid":
        choices = [choice.strip(" '") for choice in context["expected_tags"].split(",")]
        return Problem(f"{field}.kind", context["tag"], "not a choice", _choose(str(context["tag"]), choices))
    if kind == "extra_forbidden":
        return _unknown_key(place, value)
    if kind == "missing":
        return Problem(field, None, "missing", f"give it a value{_description(place)}")
    if kind == "literal_error" and place.field:
        choices = [choice.strip(" '") for choice in context["expected"].replace(" or ", ",").split(",")]
        return Problem(field, value, REASONS[kind], _choose(str(value), choices))
    reason = REASONS.get(kind, item["msg"][:1].lower() + item["msg"][1:])
    return Problem(field, value, reason, _remedy(kind, context, place))


def by_name(field: str, values: Any) -> str:
    """A field's path with the names of list items for their numbers: `data.sources.sums.path` for `data.sources.0.path`.

    values: the configuration's mapping, or a section of it. A number stays if the item has no name.
    """
    shown: list[str] = []
    for part in field.split("."):
        items, values = values, _below(values, part)
        name = values.get("name") if isinstance(items, list) and isinstance(values, Mapping) else None
        own = isinstance(name, str) and ITEM_NAME.match(name) and _names(items).count(name) == 1
        shown.append(str(name) if own else part)
    return ".".join(shown)


def _names(items: Sequence[Any]) -> list[Any]:
    return [_below(item, "name") for item in items]


def _below(values: Any, part: str) -> Any:
    if isinstance(values, list):
        return values[int(part)] if part.isdigit() and int(part) < len(values) else None
    return values.get(part) if isinstance(values, Mapping) else None


def all_fields(model: type[BaseModel] = RunConfig, above: str = "") -> dict[str, FieldInfo]:
    """Every field of every section and variant by its dotted path, with [] for items of lists."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        path = f"{above}.{name}" if above else name
        fields[path] = field
        for below in models(field.annotation):
            is_list = getattr(field.annotation, "__origin__", None) is list
            fields |= all_fields(below, f"{path}[]" if is_list else path)
    return fields


def _choose(value: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(value, choices, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}choose {', '.join(choices[:-1])} or {choices[-1]}"


def _remedy(kind: str, context: Mapping[str, Any], place: FieldPath) -> str:
    if kind == "string_pattern_mismatch":
        return NAMES.get(str(context["pattern"]), IMPORT_PATH)
    bounds = {
        "greater_than": "more than {gt}",
        "greater_than_equal": "{ge} or more",
        "less_than": "less than {lt}",
        "less_than_equal": "{le} or less",
    }
    if kind in bounds:
        return f"use {bounds[kind].format(**context)}"
    if kind == "string_type":
        return "quote it, so that YAML reads text"
    if kind in ("model_type", "model_attributes_type", "dict_type", "union_tag_not_found"):
        return "write its fields below it, or remove it"
    if kind == "list_type":
        return "write a list: items with - before them, or [a, b]"
    if kind in ("too_short", "missing_argument"):
        return "add an item"
    types = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    for name, words in types.items():
        if kind.startswith(f"{name}_"):
            return f"give {words}"
    return f"correct the value{_description(place)}"


def _unknown_key(place: FieldPath, value: Any) -> Problem:
    shown = ", ".join(map(str, value)) if isinstance(value, Mapping) else value  # options may be secrets
    having = [kind for kind, model in (place.siblings or {}).items() if place.name in model.model_fields]
    if not having:
        return Problem(place.path, shown, "unknown key", _other_key(place))
    assert place.section is not None
    kind = place.section.model_fields["kind"].default
    kinds = " or ".join([", ".join(having[:-1]), having[-1]] if len(having) > 1 else having)
    reason = f"{place.choice}.kind={kind} has no such field"
    return Problem(place.path, shown, reason, f"remove it, or set {place.choice}.kind={kinds}")


def _other_key(place: FieldPath) -> str:
    known = list(place.section.model_fields) if place.section else []
    near = difflib.get_close_matches(place.name, known, 1)
    elsewhere = [path for path in all_fields() if path.rsplit(".", 1)[-1] == place.name]
    if near and not any(path.split(".")[0] == place.parts[0] for path in elsewhere):
        return f"did you mean {near[0]}?"
    if elsewhere:
        elsewhere.sort(key=lambda path: path.split(".")[0] != place.parts[0])  # the same section's first
        return f"did you mean {' or '.join(elsewhere[:2])}?"
    return f"remove it; known here: {', '.join(known)}"


def _description(place: FieldPath) -> str:
    text = (place.field.description or "").split(". ")[0].split("; ")[0].rstrip(".") if place.field else ""
    return f" ({text})" if text else ""
