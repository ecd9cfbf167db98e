"""YAML files of a configuration: a file and its chain of `base` files.

A file with `base: other.yaml` holds the differences from that file. Paths in a file are relative to its folder, `base` too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from millrace.core.config.parts.merge import merged
from millrace.core.config.parts.redaction import shown_text
from millrace.core.config.reading.own_paths import folder_of, from_folder, with_modules_of
from millrace.core.config.reading.short_forms import without_short_forms
from millrace.core.config.reading.yaml_text import parse
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError, remedy_of

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
