"""The folder of one run: where iterations, checkpoints and exports lie, and which of them count.

Owns the layout and the commit of manifests; knows nothing of what the files mean.
"""

from __future__ import annotations

import hashlib
from typing import Any

from connectors.storage.manifest import Manifest
from connectors.storage.store import Store
from core.errors import MissingFileError, StorageError
from core.ledger import GroupOutcome, IterationHistory


class RunFolder:
    """`<storage.root>/<run>/` as DESIGN lays it out."""

    def __init__(self, root: str, run: str) -> None:
        self.store = Store(root).child(run)
        self._manifests: dict[int, Manifest] = {}

    def iteration_path(self, index: int) -> str:
        """Folder of an iteration, relative to the run's."""
        return f"iterations/{index:06d}"

    def iteration(self, index: int) -> Store:
        """Store of an iteration's folder."""
        return self.store.child(self.iteration_path(index))

    def commit_manifest(self, index: int, manifest: Manifest) -> None:
        """Make an iteration final."""
        self.store.write_json(f"{self.iteration_path(index)}/manifest.json", manifest.model_dump(mode="json"))
        self._manifests[index] = manifest

    def manifests(self) -> dict[int, Manifest]:
        """All committed manifests by iteration. What was read once is kept: a manifest never changes."""
        index = 0
        while True:
            if index not in self._manifests:
                try:
                    content = self.store.read_json(f"{self.iteration_path(index)}/manifest.json")
                except MissingFileError:
                    return {number: self._manifests[number] for number in range(index)}
                self._manifests[index] = Manifest.model_validate(content)
            index += 1

    def first_open_iteration(self) -> int:
        """The first iteration without a manifest."""
        return len(self.manifests())

    def history(self) -> list[IterationHistory]:
        """What the ledger folds: each committed iteration's groups and what became of them."""
        return [
            IterationHistory.model_validate(manifest.tasks["history"])
            for manifest in self.manifests().values()
        ]

    def outcomes(self, index: int) -> IterationHistory:
        """The history of one iteration, from its prompts and verdicts."""
        folder = self.iteration(index)
        prompts = folder.read_table(
            "prompts.parquet", "prompts", columns=["group_id", "source", "row", "epoch", "ordinal"]
        )
        verdicts = folder.read_table(
            "verdicts.parquet", "verdicts", columns=["group_id", "verdict", "reason"]
        )
        found: dict[str, tuple[str, str | None]] = {}
        for row in verdicts.to_pylist():
            if row["verdict"] == "kept" or row["group_id"] not in found:
                found[row["group_id"]] = (row["verdict"], row["reason"])
        groups = [
            GroupOutcome(
                source=row["source"],
                row=row["row"],
                epoch=row["epoch"],
                ordinal=row["ordinal"],
                verdict=found[row["group_id"]][0],
                reason=found[row["group_id"]][1],
            )
            for row in prompts.to_pylist()
        ]
        return IterationHistory(iteration=index, groups=groups)

    def checkpoint_path(self, done: int) -> str:
        """Folder of the checkpoint after `done` iterations, relative to the run's."""
        return f"checkpoints/{done:06d}"

    def complete_checkpoints(self) -> list[int]:
        """Checkpoints with a completeness marker, by iterations seen, oldest first."""
        paths = self.store.list("checkpoints")
        return sorted(int(path.split("/")[1]) for path in paths if path.endswith("/complete.json"))

    def verify(self, index: int) -> list[str]:
        """Every file of an iteration that is missing or not what its manifest says."""
        manifest: Any = self.manifests()[index]
        folder, problems = self.iteration(index), []
        for entry in manifest.files:
            try:
                data = folder.read(entry.path)
            except StorageError as error:
                problems.append(str(error))
                continue
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                problems.append(f"{folder.url_of(entry.path)}: its hash is not the one in the manifest")
        return problems
