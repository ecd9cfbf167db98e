"""Paths in a YAML file's values, made relative to the working directory; and the folder of the file's modules.

Owns the rule that a relative path means the folder of the file that holds it. A recipe that ships with millrace has no user
folder: its paths mean the working directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from millrace.core.config.parts.menu import menu_of, variant_of
from millrace.core.config.parts.paths import Reads
from millrace.core.config.parts.section import models
from millrace.core.config.run_config import RunConfig

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
