"""Shared by the environments: importing the package of an extra, and reading a row."""

import importlib
import json
import zlib
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.sessions.interface import Task


def package(module: str, extra: str) -> Any:
    """Import a module that an extra installs. Raises ConfigError naming the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"needs a package that cannot be imported: {error}",
            where="rollout.session",
            remedy=f"pip install 'millrace[{extra}]'",
        ) from error


def number(task: Task, name: str) -> int:
    """The whole number of this name in the row's metadata, otherwise a hash of the prompt. It is the same for a whole group."""
    if name in task.metadata:
        return int(task.metadata[name])
    return zlib.crc32(json.dumps(task.prompt, sort_keys=True, default=str).encode())


def last_message(task: Task) -> str:
    """The text of the prompt's last message."""
    if isinstance(task.prompt, str):
        return task.prompt
    return str(task.prompt[-1].get("content", "")) if task.prompt else ""
