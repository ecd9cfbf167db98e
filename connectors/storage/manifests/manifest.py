"""The content of an iteration's manifest.json: its files, its tasks' records, and the outcome of each group.

Owns the manifest's hash of itself, which reveals any change. Knows nothing of the file's place.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from millrace.connectors.storage.files import FileEntry
from millrace.core.accounts.history import IterationHistory
from millrace.core.contracts import schema


class Manifest(BaseModel):
    """Names, row counts and hashes of all files of an iteration. Readers trust no other file."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = schema.VERSION
    iteration: int
    files: list[FileEntry]
    tasks: dict[str, Any] = {}
    history: IterationHistory | None = None
    before: str | None = None  # hash of the previous manifest, so that none can be replaced
    run: str | None = None  # id of the run that committed it
    sha256: str = ""

    def after(self, before: Manifest | None) -> Manifest:
        """This manifest with the hash of `before`, the one it follows."""
        return self.model_copy(update={"before": before.sha256 if before else None})

    def sealed(self) -> Manifest:
        """This manifest with its hash."""
        return self.model_copy(update={"sha256": self.content_hash()})

    def content_hash(self) -> str:
        """Hash of the content as JSON, without the hash."""
        fields = {"sha256", *(name for name in ("before", "run") if not getattr(self, name))}
        content = json.dumps(self.model_dump(mode="json", exclude=fields), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def file(self, path: str) -> FileEntry:
        """The entry of a file. Raises KeyError if the manifest does not name it."""
        entry = self.find(path)
        if entry is None:
            raise KeyError(path)
        return entry

    def find(self, path: str) -> FileEntry | None:
        """The entry of a file, None if the manifest does not name it."""
        return next((entry for entry in self.files if entry.path == path), None)
