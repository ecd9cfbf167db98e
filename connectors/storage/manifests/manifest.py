"""The content of an iteration's manifest.json: its files, its tasks' records, and the outcome of each group.

Owns the manifest's hash of itself, which reveals any change. Knows nothing of the file's place.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.store import Store
from millrace.core.accounts.curriculum import part_name
from millrace.core.accounts.history import GroupOutcome, IterationHistory
from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError


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


JOINED = "joined.parquet"  # groups that the iteration before deferred
PLACE = ("row", "epoch", "ordinal")  # columns


def outcomes(folder: Store, index: int, manifest: Manifest) -> IterationHistory:
    """The history of an iteration in its folder, from its prompts and verdicts, which its manifest names."""
    tables = [
        folder.read_table(path, "prompts", entry, [*("group_id", "source", "level"), *PLACE])
        for path in ("prompts.parquet", JOINED)
        if (entry := manifest.find(path))
    ]
    tables[0] = tables[0].sort_by("ordinal")
    prompts = [row for table in tables for row in table.to_pylist()]
    verdicts = folder.read_table(
        "verdicts.parquet",
        "verdicts",
        manifest.file("verdicts.parquet"),
        columns=[
            *("group_id", "verdict", "reason", "train_step", "group_reward", "group_reward_std"),
            *("reused_from", "reused_ordinal"),
        ],
    )
    samples: dict[str, list[dict[str, Any]]] = {}
    reused: dict[int, set[int]] = {}
    for row in verdicts.to_pylist():
        if row["reused_from"] is None:
            samples.setdefault(row["group_id"], []).append(row)
        else:
            reused.setdefault(row["reused_from"], set()).add(row["reused_ordinal"])
    groups = []
    for number, row in enumerate(prompts):
        group = samples.get(row.pop("group_id"))
        row["ordinal"] = number
        row["source"] = part_name(row["source"], row.pop("level"))
        if group is None:
            raise CorruptFileError(
                f"has no verdict on the group of {row}", where=folder.url_of("verdicts.parquet")
            )
        kept = [sample for sample in group if sample["verdict"] == "kept"]
        shown = (kept or group)[0]
        steps = sorted({sample["train_step"] for sample in kept})
        groups.append(
            GroupOutcome(
                **row,
                verdict=shown["verdict"],
                reason=shown["reason"],
                steps=steps,
                score=shown["group_reward"],
                std=shown["group_reward_std"],
            )
        )
    return IterationHistory.of(index, groups, reused, joined=sum(table.num_rows for table in tables[1:]))
