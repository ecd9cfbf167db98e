"""A configuration from a YAML file and `key=value` overrides, with every problem found at once.

Owns reading and the wording of pydantic's findings; cross-field rules stand in millrace.core.config.rules. What does not parse is
reported with its place; what parses is validated whole, and rules are asked of whatever part of it makes sense.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from millrace.core.config import rules
from millrace.core.config.findings import as_problem
from millrace.core.config.overrides import apply
from millrace.core.config.problems import Problem, render_problems
from millrace.core.config.run import RunConfig
from millrace.core.config.yaml_text import parse
from millrace.core.errors import ConfigError

Values = dict[str, Any]
STAND_INS: dict[tuple[int | str, ...], Any] = {("run", "name"): "unnamed", ("model", "path"): "model"}


def load_config(path: str | None, overrides: Sequence[str] = (), text: str | None = None) -> RunConfig:
    """The configuration of a YAML file (or text) with overrides on top. Raises ConfigError naming every problem."""
    values = _read(path, text)
    problems: list[Problem] = []
    for override in overrides:
        try:
            apply(values, override)
        except ValueError as error:
            problems.append(Problem("override", override, *_halves(error)))
    config, found = validate(values)
    problems += found
    if problems or config is None:
        raise ConfigError(render_problems(problems))
    return config


def validate(values: Values) -> tuple[RunConfig | None, list[Problem]]:
    """The configuration if the values make one; else what is wrong with them, rules between fields included."""
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        items = error.errors()
    problems = [as_problem(item) for item in items]
    rest = copy.deepcopy(values)
    for item in items:
        _leave_out(rest, item["loc"])
    try:
        sound = RunConfig.model_validate(rest)
    except ValidationError:
        return None, problems
    wrong = [problem.field for problem in problems]
    return None, problems + [
        p for p in rules.problems(sound) if not any(p.field.startswith(w) for w in wrong)
    ]


def _leave_out(values: Any, place: Sequence[int | str]) -> None:
    """Remove a value that is wrong, so that its default stands in for it; required ones get a stand-in."""
    if not place:
        return
    *above, last = place
    for part in above:
        if not isinstance(values, dict | list) or (isinstance(values, dict) and part not in values):
            return
        values = values[part]  # type: ignore[index]
    if isinstance(values, dict):
        values.pop(last, None)
        if tuple(place) in STAND_INS:
            values[last] = STAND_INS[tuple(place)]


def _read(path: str | None, text: str | None) -> Values:
    name = path or "the configuration"
    if text is None:
        if path is None:
            return {}
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}; name a YAML file") from error
    try:
        values = parse(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        line = text.splitlines()[mark.line].strip() if mark and mark.line < len(text.splitlines()) else ""
        shown = f" ({line[:60]})" if line else ""
        raise ConfigError(
            f"{name}: not YAML at {where}{shown}: {error.problem or error.context}; correct that line or the one above it"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {error}; remove that character") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name}: a mapping of sections is wanted, not {type(values).__name__}; begin with run:, model: and data:"
        )
    return {str(key): value for key, value in values.items()}


def _halves(error: ValueError) -> tuple[str, str]:
    reason, _, remedy = str(error).rpartition("; ")
    return reason, remedy
