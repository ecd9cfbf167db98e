"""A configuration from a YAML file and `key=value` overrides, with every problem found at once.

Owns reading and the wording of pydantic's findings; cross-field rules stand in core.config.rules.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from core.config.problems import Problem, render_problems
from core.config.run import RunConfig
from core.errors import ConfigError


def load_config(path: str | None, overrides: Sequence[str] = (), text: str | None = None) -> RunConfig:
    """The configuration of a YAML file (or text) with overrides on top. Raises ConfigError naming every problem."""
    values = _read(path, text)
    for override in overrides:
        _apply(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(render_problems([_problem(item) for item in error.errors()])) from None


def _read(path: str | None, text: str | None) -> dict[str, Any]:
    if text is None:
        if path is None:
            return {}
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}; name a YAML file") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise ConfigError(
            f"{path or 'the configuration'}: not YAML at {where}: {getattr(error, 'problem', error)}"
        ) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path or 'the configuration'}: a mapping of sections is wanted, not {type(values).__name__}"
        )
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, sign, value = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r}: give key=value, as in run.name=a")
    at: Any = values
    parts = key.split(".")
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        empty: Any = [] if following is not None and following.isdigit() else {}
        last = following is None
        new = yaml.safe_load(value) if last else empty
        if isinstance(at, list):
            if not part.isdigit() or int(part) > len(at):
                raise ConfigError(f"override {override!r}: {part!r} is no index of a list of {len(at)}")
            if int(part) == len(at):
                at.append(new)
            elif last:
                at[int(part)] = new
            at = at[int(part)]
        elif isinstance(at, dict):
            if last or not isinstance(at.get(part), dict | list):
                at[part] = new
            at = at[part]


def _problem(item: Any) -> Problem:
    place = [str(part) for part in item["loc"]]
    field = ".".join(place) or "the configuration"
    value = item.get("input")
    if item["type"] == "extra_forbidden":
        known = _known(place[:-1])
        near = difflib.get_close_matches(place[-1], known, 1)
        remedy = f"did you mean {near[0]}?" if near else f"remove it; known here: {', '.join(known)}"
        return Problem(field, value, "unknown key", remedy)
    if item["type"] == "missing":
        return Problem(field, None, "missing", "give it a value")
    return Problem(field, value, item["msg"][:1].lower() + item["msg"][1:], "correct the value")


def _known(place: Sequence[str]) -> list[str]:
    model: Any = RunConfig
    for part in place:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        inner = [annotation, *getattr(annotation, "__args__", ())]
        model = next(kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(model.model_fields)
