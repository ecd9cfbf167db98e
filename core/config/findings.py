"""pydantic's findings in words that name field, value and remedy. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from millrace.core.config.problems import Problem
from millrace.core.config.run import RunConfig

IMPORT_PATH = "write it as package.module:function"
REASONS = {"literal_error": "not a choice", "string_pattern_mismatch": "does not have the form that it needs"}
NAMES = {
    r"^[a-z0-9][a-z0-9._-]{0,62}$": "use lower-case letters, digits, dots, hyphens and underscores, 63 at most",
    r"^[A-Za-z0-9._-]+$": "use letters, digits, dots, hyphens and underscores",
}


def as_problem(item: Mapping[str, Any]) -> Problem:
    """One of ValidationError.errors() as a problem."""
    place = [str(part) for part in item["loc"]]
    field, value, kind = ".".join(place) or "the configuration", item.get("input"), item["type"]
    if kind == "extra_forbidden":
        return Problem(field, value, "unknown key", _other_key(place))
    if kind == "missing":
        return Problem(field, None, "missing", f"give it a value{_description(place)}")
    reason = REASONS.get(kind, _lower(item["msg"]))
    return Problem(field, value, reason, _remedy(kind, item.get("ctx") or {}, place))


def models(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's annotation names, within lists and unions too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models(part)]


def all_fields(model: type[BaseModel] = RunConfig, above: str = "") -> dict[str, Any]:
    """Every field of every section by its dotted path; items of lists by [] in it."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        path = f"{above}.{name}" if above else name
        found[path] = field
        for below in models(field.annotation):
            is_list = getattr(field.annotation, "__origin__", None) is list
            found |= all_fields(below, f"{path}[]" if is_list else path)
    return found


def _remedy(kind: str, context: Mapping[str, Any], place: Sequence[str]) -> str:
    if kind == "literal_error":
        return f"choose {context['expected']}"
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
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "write its fields below it, or remove it"
    if kind == "list_type":
        return "write a list: items with - before them, or [a, b]"
    if kind in ("too_short", "missing_argument"):
        return "add an item"
    wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    for name, words in wanted.items():
        if kind.startswith(f"{name}_"):
            return f"give {words}"
    return f"correct the value{_description(place)}"


def _other_key(place: Sequence[str]) -> str:
    known = _known(place[:-1])
    near = difflib.get_close_matches(place[-1], known, 1)
    if near:
        return f"did you mean {near[0]}?"
    elsewhere = [path for path in all_fields() if path.rsplit(".", 1)[-1] == place[-1]]
    if elsewhere:
        elsewhere.sort(key=lambda path: path.split(".")[0] != place[0])  # the same section's first
        return f"did you mean {' or '.join(elsewhere[:2])}?"
    return f"remove it; known here: {', '.join(known)}"


def _known(place: Sequence[str]) -> list[str]:
    section = _section(place)
    return list(section.model_fields) if section else []


def _section(place: Sequence[str]) -> type[BaseModel] | None:
    model: type[BaseModel] = RunConfig
    for part in place:
        if part.isdigit():
            continue
        below = models(model.model_fields[part].annotation) if part in model.model_fields else []
        if not below:
            return None
        model = below[0]
    return model


def _description(place: Sequence[str]) -> str:
    section = _section(place[:-1])
    field = section.model_fields.get(place[-1]) if section and place else None
    text = (field.description or "").split(". ")[0].split("; ")[0].rstrip(".") if field else ""
    return f" ({text})" if text else ""


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
