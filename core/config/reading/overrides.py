"""`key=value` overrides: dotted keys, into lists by index or by an item's name. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.core.config.parts.menu import menu_of, spelled_out, variant_of
from millrace.core.config.parts.section import models
from millrace.core.config.parts.user_function import UserFunction, listed
from millrace.core.config.reading.yaml_text import MAX_DEPTH, parse
from millrace.core.config.reward import NamedReward
from millrace.core.config.rollout import NamedRollout
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError


def apply(values: dict[str, Any], override: str) -> None:
    """Set one value in place; the value is read as YAML. Raises ConfigError saying what is wrong and the remedy."""
    key, sign, text = override.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts):
        raise ConfigError("has no key=value form", remedy="write it as in run.name=a")
    if len(parts) > MAX_DEPTH:
        raise ConfigError(f"its key is nested more than {MAX_DEPTH} deep", remedy="name a field")
    try:
        value = parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"its value is not YAML: {getattr(error, 'problem', error)}", remedy="quote the value"
        ) from error
    _set(values, parts, value, [])


def _set(at: Any, parts: Sequence[str], value: Any, above: Sequence[str]) -> None:
    if isinstance(at, list):
        _set_item(at, parts, value, above)
        return
    if not isinstance(at, dict):
        here = ".".join(above)
        raise ConfigError(f"{here} is {at!r}, which has no fields below it", remedy=f"set {here} itself")
    first, *rest = parts
    if not rest:
        at[first] = value
        return
    if at.get(first) is None:
        at[first] = [] if rest[0].isdigit() else {}
    _set(at[first], rest, value, [*above, first])


def _set_item(items: list[Any], parts: Sequence[str], value: Any, above: Sequence[str]) -> None:
    place, rest = _find(items, parts, above)
    if not rest:
        items[place : place + 1] = [value]
        return
    if place == len(items):
        items.append({})
    _set(items[place], rest, value, [*above, str(place)])


def _find(items: Sequence[Any], parts: Sequence[str], above: Sequence[str]) -> tuple[int, Sequence[str]]:
    """The item that the key names, and the parts below it. Names may hold dots, so the longest name that fits is taken."""
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in names:
            return names.index(name), parts[end:]
    if parts[0].isdigit() and int(parts[0]) <= len(items):
        return int(parts[0]), parts[1:]
    known = ", ".join([*map(str, range(len(items))), *(name for name in names if isinstance(name, str))])
    here = ".".join(above)
    raise ConfigError(
        f"{here} has no item {parts[0]}",
        remedy=f"use {known or '0'}" + (f", or {len(items)} to add one" if known else ""),
    )


BY_NAME = ([NamedReward], [NamedRollout])  # sections of a list that may be given as a mapping of names


def without_short_forms(values: Any, model: type[BaseModel] = RunConfig) -> Any:
    """The values with `loss: gspo` as `loss: {kind: gspo}`, `prepare: a:b` as `prepare: {function: a:b}`, and functions by name as a list."""
    if isinstance(values, str) and issubclass(model, UserFunction):
        return {"function": values}
    if not isinstance(values, Mapping):
        return values
    fields = model.model_fields
    return {name: _field(value, fields[name]) if name in fields else value for name, value in values.items()}


def _field(value: Any, field: FieldInfo) -> Any:
    sections = models(field.annotation)
    if not sections:
        return value
    if menu_of(field):
        value = spelled_out(value)
        variant = variant_of(field, value)
        return without_short_forms(value, variant) if variant else value
    if sections in BY_NAME:
        value = listed(value)
    if isinstance(value, list):
        return [without_short_forms(item, sections[0]) for item in value]
    return without_short_forms(value, sections[0])
