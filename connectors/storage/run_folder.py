"""The folder of one run: where iterations, checkpoints and exports lie, and which of them are complete.

Owns the layout, the commit of manifests and the completeness of checkpoints. Knows nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import json
import logging

from pydantic import ValidationError

from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.manifest import Manifest
from millrace.connectors.storage.parts import take_over_parts
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.contracts.ids import iteration_number, run_identity
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError
from millrace.core.ledger import GroupOutcome, IterationHistory

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COMPLETE = "complete.json"
PUBLISHED = "results/publish.json"  # written after the manifest
ABANDONED_S = 3600.0
MAKE_AGAIN = "restore it from a copy, or remove it and start the run again: it is made again from the iteration's records"


class RunFolder:
    """`<storage.root>/<run>/`."""

    def __init__(self, root: str, run: str) -> None:
        self.name = run
        self.store = Store(root).child(run)
        self._manifests: list[Manifest] = []

    def identity(self, run_id: str | None) -> str:
        """What the run's actors and temporary files are named by. run_id: of its run.json; those of earlier releases have none."""
        return run_identity(self.name, self.store.real_url, run_id) if run_id else self.name

    # iterations

    def iteration_path(self, index: int) -> str:
        """Folder of an iteration, relative to the run's."""
        return f"iterations/{index:06d}"

    def iteration(self, index: int) -> Store:
        """Store of an iteration's folder."""
        return self.store.child(self.iteration_path(index))

    def commit_manifest(self, index: int, manifest: Manifest, expected: str | None = None) -> Manifest:
        """Make an iteration final and return its manifest. Adds the outcome of its groups from its verdicts, if it has any.

        A committed manifest is never overwritten: committing the same files again does nothing, committing others raises
        StorageError. expected: the hash that it must have, where it was committed before. Raises CorruptFileError if not.
        """
        assert manifest.iteration == index
        committed = self.manifest(index)
        if committed:
            if committed.files != manifest.files:
                raise StorageError(
                    f"iteration {iteration_number(index)} is committed with other files, and a committed iteration is final",
                    where=self._manifest_url(index),
                    remedy="end every other process that drives the run, and start this one again: it goes on after the "
                    "committed iteration",
                )
            log.info("iteration %d was committed before", iteration_number(index))
            return committed
        if manifest.history is None and any(entry.path == "verdicts.parquet" for entry in manifest.files):
            manifest = manifest.model_copy(update={"history": self.outcomes(index, manifest)})
        before = self.manifest(index - 1) if index else None
        manifest = manifest.after(before).sealed()
        if expected and manifest.sha256 != expected:
            raise CorruptFileError(
                "made again from the records, it is not the manifest that was committed",
                where=self._manifest_url(index),
                remedy=f"restore it from a copy, or go on from a checkpoint before it: `millrace branch {self.name} NEW --at "
                "ITERATION`",
            )
        content = json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False)
        if not self.store.create(f"{self.iteration_path(index)}/{MANIFEST}", content.encode()):
            return self.commit_manifest(index, manifest)  # another driver did meanwhile: its files decide
        return manifest

    def manifest(self, index: int) -> Manifest | None:
        """The manifest of an iteration, None if it is not committed. Raises CorruptFileError naming it."""
        if index < len(self._manifests):
            return self._manifests[index]
        try:
            content = self.store.read_json(f"{self.iteration_path(index)}/{MANIFEST}")
        except MissingFileError:
            return None
        except CorruptFileError as error:
            error.remedy = MAKE_AGAIN
            raise
        url = self._manifest_url(index)
        if isinstance(content, dict) and content.get("schema_version") != schema.VERSION:
            raise CorruptFileError(
                f"of schema version {content.get('schema_version')}, wanted {schema.VERSION}",
                where=url,
                remedy="continue the run with the release that wrote it",
            )
        try:
            manifest = Manifest.model_validate(content)
        except ValidationError as error:
            raise CorruptFileError(f"not a manifest: {error}", where=url, remedy=MAKE_AGAIN) from error
        if manifest.sha256 != manifest.content_hash() or manifest.iteration != index:
            raise CorruptFileError(
                "its content does not have the hash it names", where=url, remedy=MAKE_AGAIN
            )
        return manifest

    def manifests(self) -> dict[int, Manifest]:
        """All committed manifests by iteration. Each is read once: a manifest never changes.

        Raises CorruptFileError if one is broken or does not follow the one before, MissingFileError if one is gone: others
        follow, or the iteration was published.
        """
        start = len(self._manifests)
        numbers = [number for number in self._numbers("iterations") if number >= start]
        by_number = dict(zip(numbers, in_threads(self.manifest, numbers), strict=True))
        while manifest := by_number.get(len(self._manifests)):
            self._check_order(manifest)
            self._manifests.append(manifest)
            del by_number[manifest.iteration]
        first = len(self._manifests)
        if any(by_number.values()) or (first in by_number and self.iteration(first).exists(PUBLISHED)):
            raise MissingFileError(
                "no such file, though the iteration was committed",
                where=self._manifest_url(first),
                remedy="start the run again: it is made again from the iteration's records. Where they are gone too, restore "
                f"it from a copy, or go on from a checkpoint before it: `millrace branch {self.name} NEW --at ITERATION`",
            )
        return dict(enumerate(self._manifests))

    def take_over(self) -> int:
        """Note what earlier drivers left in the first open iteration, so that what they still write there does not count.

        For the holder of the lease, before it works. Returns the iteration's index.
        """
        assert self.store.fence is not None, "the lease comes first"
        index, token = self.first_open_iteration(), self.store.fence.token
        if token > 1:
            take_over_parts(self.iteration(index), ("rollouts", "rewards"), token)
        return index

    def first_open_iteration(self, strict: bool = True) -> int:
        """The first iteration without a manifest. Unless `strict`, also where one is gone that was committed."""
        with contextlib.nullcontext() if strict else contextlib.suppress(MissingFileError):
            self.manifests()
        return len(self._manifests)

    def history(self) -> list[IterationHistory]:
        """The groups of each committed iteration and their outcomes, from which the ledger is computed."""
        return [manifest.history for manifest in self.manifests().values() if manifest.history]

    def outcomes(self, index: int, manifest: Manifest) -> IterationHistory:
        """The history of one iteration, from its prompts and verdicts, which its manifest names."""
        folder = self.iteration(index)
        prompts = folder.read_table(
            "prompts.parquet",
            "prompts",
            manifest.file("prompts.parquet"),
            columns=["group_id", "source", "row", "epoch", "ordinal"],
        )
        verdicts = folder.read_table(
            "verdicts.parquet",
            "verdicts",
            manifest.file("verdicts.parquet"),
            columns=["group_id", "verdict", "reason", "train_step"],
        )
        samples: dict[str, list[dict[str, str | int | None]]] = {}
        for row in verdicts.to_pylist():
            samples.setdefault(row["group_id"], []).append(row)
        groups = []
        for row in prompts.to_pylist():
            group = samples.get(row.pop("group_id"))
            if group is None:
                raise CorruptFileError(
                    f"has no verdict on the group of {row}",
                    where=folder.url_of("verdicts.parquet"),
                    remedy="restore the file",
                )
            kept = [sample for sample in group if sample["verdict"] == "kept"]
            shown = (kept or group)[0]
            steps = sorted({sample["train_step"] for sample in kept})  # type: ignore[type-var]
            groups.append(GroupOutcome(**row, verdict=shown["verdict"], reason=shown["reason"], steps=steps))
        return IterationHistory.of(index, groups)

    def verify(self, index: int) -> list[str]:
        """Problems of a committed iteration: each file that is missing or differs from its manifest."""
        try:
            manifest = self.manifest(index)
        except StorageError as error:
            return [str(error)]
        if manifest is None:
            return [
                f"{self._manifest_url(index)}: no such file; iteration {iteration_number(index)} is not committed"
            ]
        folder = self.iteration(index)

        def problem(entry: FileEntry) -> str | None:
            try:
                folder.verify(entry)
            except StorageError as error:
                return str(error)
            return None

        return [text for text in in_threads(problem, manifest.files) if text]

    # checkpoints

    def checkpoint_path(self, done: int) -> str:
        """Folder of the checkpoint after `done` iterations, relative to the run's."""
        return f"checkpoints/{done:06d}"

    def complete_checkpoints(self) -> list[int]:
        """Checkpoints with a completeness marker, by the number of iterations done, oldest first."""
        return [done for done in self._numbers("checkpoints") if self._is_complete(done)]

    def remove_checkpoint(self, done: int) -> None:
        """Remove a checkpoint, its marker first: if interrupted, the checkpoint is incomplete."""
        self.store.remove(f"{self.checkpoint_path(done)}/{COMPLETE}")
        self.store.remove(self.checkpoint_path(done), recursive=True)

    def clean(self) -> list[str]:
        """Remove temporary files of interrupted writes, with a log line each; returns the paths."""
        removed = self.store.sweep(ABANDONED_S)
        for path in removed:
            log.warning("removed %s: an interrupted write left it", self.store.url_of(path))
        return removed

    def _numbers(self, folder: str) -> list[int]:
        return sorted(int(name) for name in self.store.folders(folder) if name.isdecimal())

    def _is_complete(self, done: int) -> bool:
        return self.store.exists(f"{self.checkpoint_path(done)}/{COMPLETE}")

    def _check_order(self, manifest: Manifest) -> None:
        if manifest.before and self._manifests and manifest.before != self._manifests[-1].sha256:
            raise CorruptFileError(
                f"is not the manifest that iteration {iteration_number(manifest.iteration)} follows",
                where=self._manifest_url(manifest.iteration - 1),
                remedy=MAKE_AGAIN,
            )

    def _manifest_url(self, index: int) -> str:
        return self.store.url_of(f"{self.iteration_path(index)}/{MANIFEST}")
