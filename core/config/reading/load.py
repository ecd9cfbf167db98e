"""A configuration from YAML files and `key=value` overrides, with every problem found at once.

Text that does not parse is reported with its place. The rest is validated whole, and the rules between fields are applied
to every part of it that makes sense.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from millrace.core.config import rules
from millrace.core.config import secret_rules as secrets
from millrace.core.config.parts.problems import Problem, render_problems
from millrace.core.config.reading.files import Values, from_folder, parse_values, read_files
from millrace.core.config.reading.findings import as_problem, by_name, place_of
from millrace.core.config.reading.overrides import apply, without_short_forms
from millrace.core.config.reading.yaml_text import odd_values
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError

STAND_INS: dict[str, Any] = {
    "run.name": "unnamed",
    "model.path": "model",
    "engines.addresses": ["http://localhost:30000"],
    "function": "module:function",
}


@dataclass(frozen=True)
class Reading:
    """A configuration that was read, and its problems.

    `config`: without the wrong values, if there are any; None if the rest makes no configuration.
    """

    config: RunConfig | None
    problems: list[Problem]


def load_config(path: str | None, overrides: Sequence[str] = (), text: str | None = None) -> RunConfig:
    """The configuration of a YAML file (or text) with overrides on top. Raises ConfigError naming every problem.

    Relative paths in a file mean its folder; relative paths in overrides and in a text mean the working directory.
    """
    reading = read_config(path, overrides, text)
    if reading.problems or reading.config is None:
        raise ConfigError(render_problems(reading.problems))
    return reading.config


def read_config(path: str | None, overrides: Sequence[str] = (), text: str | None = None) -> Reading:
    """Read a configuration, with its problems as a list. Raises ConfigError for a file that cannot be read or is not YAML."""
    if text is not None:
        values = parse_values(text, path or "the configuration")
    else:
        values = read_files(path) if path is not None else {}
    problems: list[Problem] = []
    for override in overrides:
        try:
            apply(values, override)
        except ConfigError as error:
            problems.append(Problem("override", override, error.reason, error.remedy))
        values = without_short_forms(values)
    config, wrong = _validated(from_folder(values, ""))
    problems += [problem._replace(field=by_name(problem.field, values)) for problem in wrong]
    return Reading(config, problems)


def validate(values: Values) -> tuple[RunConfig | None, list[Problem]]:
    """The configuration if the values make one; else what is wrong with them, rules between fields included."""
    config, problems = _validated(values)
    return (None if problems else config), problems


def _validated(values: Values) -> tuple[RunConfig | None, list[Problem]]:
    values = without_short_forms(values)
    rest = copy.deepcopy(values)
    problems = []
    for place, problem in odd_values(values):
        problems.append(problem)
        _leave_out(rest, place, stand_in=True)
    try:
        config = RunConfig.model_validate(rest)
        # secrets are looked for before anything stores or prints the configuration
        return config, problems + list(secrets.problems(config))
    except ValidationError as error:
        items = error.errors()
    problems += [as_problem(item) for item in items]
    for item in items:
        _leave_out(rest, place_of(item["loc"]).parts, stand_in=item["type"] != "extra_forbidden")
    try:
        sound = RunConfig.model_validate(rest)
    except ValidationError:
        return None, problems
    wrong = [problem.field for problem in problems]
    return sound, problems + [p for p in rules.problems(sound) if not any(name in str(p) for name in wrong)]


def _leave_out(values: Any, place: Sequence[int | str], stand_in: bool) -> None:
    """Remove a value that is wrong, so that its default is used instead; required ones get a stand-in."""
    if not place:
        return
    *above, last = place
    for part in above:
        if not isinstance(values, dict | list) or (isinstance(values, dict) and part not in values):
            return
        values = values[part]  # type: ignore[index]
    if isinstance(values, dict):
        values.pop(last, None)
        for key in (".".join(map(str, place)), str(last)):
            if stand_in and key in STAND_INS:
                values[last] = STAND_INS[key]


VERSION = 2


def readable(record: Mapping[str, Any]) -> dict[str, Any]:
    """A run.json whose configuration has today's fields. Raises ConfigError if a millrace of other fields wrote it."""
    version = record.get("config_version")
    if version != VERSION:
        raise ConfigError(
            f"config_version is {version}, and this millrace reads {VERSION}",
            where=f"run.json of {record.get('name', '?')}",
            remedy="install the millrace that wrote it",
        )
    return dict(record)
