"""What an iteration's manifest.json holds: the files that count, what their tasks said, what became of each group.

Owns the manifest's own hash, so that a changed bit in it is noticed too; knows nothing of where it lies.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from millrace.connectors.storage.store import FileEntry
from millrace.core.contracts import schema
from millrace.core.ledger import IterationHistory


class Manifest(BaseModel):
    """Names, row counts and hashes of every file of an iteration. A reader trusts nothing else."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = schema.VERSION
    iteration: int
    files: list[FileEntry]
    tasks: dict[str, Any] = {}
    history: IterationHistory | None = None
    sha256: str = ""

    def sealed(self) -> Manifest:
        """This manifest with its hash."""
        return self.model_copy(update={"sha256": self.content_hash()})

    def content_hash(self) -> str:
        """Hash of everything but the hash itself, as JSON."""
        content = json.dumps(self.model_dump(mode="json", exclude={"sha256"}), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def file(self, path: str) -> FileEntry:
        """The entry of a file. Raises KeyError for a file that the manifest does not name."""
        for entry in self.files:
            if entry.path == path:
                return entry
        raise KeyError(path)
