"""The version of run.json's fields: a record of another version is refused by name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.core.errors import ConfigError

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
