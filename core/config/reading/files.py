"""YAML files of a configuration: a file and its chain of `base` files.

A file with `base: other.yaml` holds the differences from that file. Paths in a file are relative to its folder, `base` too.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from millrace.core.config.parts.from_preset import merged
from millrace.core.config.parts.menu import menu_of, variant_of
from millrace.core.config.parts.redaction import shown_text
from millrace.core.config.parts.section import Reads, models
from millrace.core.config.reading.overrides import without_short_forms
from millrace.core.config.reading.yaml_text import parse
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError, remedy_of

RECIPES = Path(__file__).resolve().parents[3] / "deployments" / "recipes"
NAME_ON_HUB = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


def folder_of(file: Path) -> str:
    """The folder that relative paths in a file mean; empty for the working directory."""
    if file.resolve().is_relative_to(RECIPES):
        return ""
    folder = file.parent
    return "" if os.path.realpath(folder) == os.path.realpath(os.getcwd()) else str(folder)


def from_folder(values: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The values with paths that a run reads made relative to the working directory. A leading `~` is the home folder.

    folder: the folder that relative paths mean now; empty for the working directory.
    """
    run = values.get("run")
    # run.prepare makes what is missing, so the path need not exist yet
    made = isinstance(run, Mapping) and bool(run.get("prepare"))
    paths: dict[str, Any] = _section(values, RunConfig, folder, made)
    return paths


def with_modules_of(values: dict[str, Any], folder: str, below: Mapping[str, Any]) -> dict[str, Any]:
    """The values with run.import_from set to `folder` and the folders of their base files, unless they set it themselves."""
    run, base = values.get("run", {}), below.get("run", {})
    if not isinstance(run, Mapping) or not isinstance(base, Mapping) or "import_from" in run:
        return values
    inherited = base.get("import_from") or []
    folders = [os.path.abspath(folder)] if folder else []
    if not folders or not isinstance(inherited, list):
        return values
    folders += [other for other in inherited if other not in folders]
    return {**values, "run": {**run, "import_from": folders}}


def path_from(folder: str, path: str, or_name: bool = False) -> str:
    """A path made relative to the working directory. A name on Hugging Face stays, unless a folder is there."""
    if not path or "://" in path:
        return path
    path = os.path.expanduser(path)
    if not folder or os.path.isabs(path):
        return path
    there = os.path.join(folder, path)
    return path if or_name and is_name(path) and not os.path.isdir(there) else there


def is_name(path: str) -> bool:
    """Whether a path has the form of a model's name on Hugging Face: owner/name."""
    return bool(NAME_ON_HUB.match(path))


def _section(values: Any, model: type[BaseModel], folder: str, made: bool) -> Any:
    if not isinstance(values, Mapping):
        return values
    result = dict(values)
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None:
            continue
        reads = next((item for item in field.metadata if isinstance(item, Reads)), None)
        if reads:
            result[name] = _paths(value, folder, reads.or_name and not made)
        elif sections := models(field.annotation):
            section = (variant_of(field, value) if menu_of(field) else None) or sections[0]
            result[name] = (
                [_section(item, section, folder, made) for item in value]
                if isinstance(value, list)
                else _section(value, section, folder, made)
            )
    return result


def _paths(value: Any, folder: str, or_name: bool) -> Any:
    if isinstance(value, list):
        return [_paths(item, folder, or_name) for item in value]
    return path_from(folder, value, or_name) if isinstance(value, str) else value


Values = dict[str, Any]


def read_files(path: str, chain: Sequence[Path] = ()) -> Values:
    """The values of a file over its base's values, without short forms.

    chain: the files that led here. Raises ConfigError naming the chain when a base is missing or comes a second time.
    """
    file = Path(path)
    here = [*chain, file]
    if os.path.realpath(file) in [os.path.realpath(other) for other in chain]:
        raise ConfigError(
            "the files are bases of each other", where=_shown(here), remedy="remove `base` from one of them"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = remedy_of(error, "correct `base` in the file before it" if chain else "name a YAML file")
        raise ConfigError(f"cannot be read: {error}", where=_shown(here), remedy=remedy) from error
    return parse_values(text, _shown(here), here)


def parse_values(text: str, name: str = "the configuration", chain: Sequence[Path] = ()) -> Values:
    """The values of a text over its base's values. `name` stands in errors, which are ConfigErrors with line and column."""
    try:
        values = parse(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "an unknown place"
        line = text.splitlines()[mark.line].strip() if mark and mark.line < len(text.splitlines()) else ""
        shown = f" ({shown_text(line)[:60]})" if line else ""
        raise ConfigError(
            f"not YAML at {where}{shown}: {error.problem or error.context}",
            where=name,
            remedy="correct that line or the one above it",
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}", where=name, remedy="remove that character") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"must be a mapping of sections, not {type(values).__name__}",
            where=name,
            remedy="start with run:, model: and data:",
        )
    named = {str(key): value for key, value in values.items()}
    base = named.pop("base", None)
    folder = folder_of(chain[-1]) if chain else ""
    complete: Values = from_folder(without_short_forms(named), folder)
    if base is None:
        return with_modules_of(complete, folder, {})
    if not isinstance(base, str) or "\0" in base:
        raise ConfigError(f"base is {base!r}", where=name, remedy="give the path of one YAML file")
    below = read_files(str((chain[-1].parent if chain else Path()) / base), chain)
    return merged(below, with_modules_of(complete, folder, below), RunConfig)


def _shown(chain: Sequence[Path]) -> str:
    return " -> ".join(str(file) for file in chain)
