"""Bare strings in a configuration's values, and the mappings that they stand for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.core.config.parts.menu import menu_of, spelled_out, variant_of
from millrace.core.config.parts.section import models
from millrace.core.config.parts.user_function import UserFunction, listed
from millrace.core.config.reward import NamedReward
from millrace.core.config.rollout import NamedRollout
from millrace.core.config.run_config import RunConfig

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
