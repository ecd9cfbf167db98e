"""What an iteration's manifest.json holds: the files that count, and what their tasks said."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from connectors.storage.store import FileEntry
from core import schema


class Manifest(BaseModel):
    """Names, row counts and hashes of every file of an iteration. A reader trusts nothing else."""

    schema_version: int = schema.VERSION
    iteration: int
    files: list[FileEntry]
    tasks: dict[str, Any] = {}
