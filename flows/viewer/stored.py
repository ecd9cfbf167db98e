"""What a viewer reads of a run: its record, its iterations and the files of each, as far as they are whole.

Owns that a broken, missing or half-written file is named and everything else is shown. Reads by listing and by byte ranges,
changes nothing. Knows nothing of pages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.images import StoredImages, as_stored, opened
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.manifests.summaries import Committed
from millrace.connectors.storage.parts import PART_FOLDERS, list_parts
from millrace.connectors.storage.ranged import RangedTables
from millrace.connectors.storage.run_folder import LOGPROBS, MANIFEST, RunFolder, manifest_of, numbers_of
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.images import data_url
from millrace.core.errors import MissingFileError, StorageError
from millrace.flows.driver.stored_run import run_record, settings_of
from millrace.flows.viewer.messages import Pictures


@dataclass(frozen=True)
class NotShown:
    """A file that is not shown, or that should not be trusted."""

    where: str
    what: str
    remedy: str = ""

    @classmethod
    def of(cls, error: StorageError) -> NotShown:
        """The error as a problem."""
        return cls(error.where, error.reason, error.remedy)


@dataclass
class Problems:
    """The problems of one answer, each once."""

    found: dict[tuple[str, str], NotShown] = field(default_factory=dict)

    def note(self, error: StorageError) -> None:
        """Add an error."""
        self.found.setdefault((error.where, error.reason), NotShown.of(error))

    def listed(self) -> list[NotShown]:
        """All of them, in the order they were found."""
        return list(self.found.values())


@dataclass(frozen=True)
class Iteration:
    """An iteration's files as its manifest or its records name them; for an open one also the parts without a record."""

    index: int
    committed: bool
    entries: Mapping[str, FileEntry]
    tables: RangedTables
    files: IterationFiles

    @property
    def number(self) -> int:
        """As people count: from 1."""
        return iteration_number(self.index)

    def of_kind(self, kind: str) -> list[FileEntry]:
        """The entries of a kind of table, in the order of their paths: a table, or the parts of a folder."""
        return [
            self.entries[path]
            for path in sorted(self.entries)
            if path.startswith((f"{kind}/", f"{kind}.parquet"))
        ]


class ViewedRun:
    """One run. `refresh` reads what was committed since; other reads may follow from any thread."""

    def __init__(self, root: str, name: str) -> None:
        """Raises StorageError if there is no such run."""
        self.root, self.name = root, name
        self.folder = RunFolder(root, name)
        self.record: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.committed: dict[int, Committed] = {}  # by index; without those whose manifest is broken
        self.problems = Problems()
        self._alone = False  # a manifest is broken: each is read by itself
        self._lock = threading.Lock()
        self._iterations: OrderedDict[int, Iteration] = OrderedDict()
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self.refresh()

    def pictures(self, problems: Problems) -> Pictures:
        """Shows the pictures of prompts, made again from their pixels. A broken or missing one is a problem."""
        stored = StoredImages(self.folder.store)

        shown: dict[str, str] = {}  # a group's samples have one prompt

        def picture(name: str) -> str | None:
            try:
                if name not in shown:
                    shown[name] = data_url(as_stored(opened(stored.read(name).png)))
                return shown[name]
            except StorageError as error:
                problems.note(error)
                return None

        return picture

    def refresh(self) -> None:
        """Read what was committed since the last call."""
        with self._lock:
            problems = Problems()
            try:
                self.record = run_record(self.root, self.name)
                self.settings = settings_of(self.record)
            except StorageError as error:
                if not self.folder.store.list("iterations"):
                    raise
                problems.note(error)
            self._read_committed(problems)
            self.problems = problems

    def numbers(self) -> list[int]:
        """The indices of all iterations that have a folder or are committed, in order."""
        return sorted({*self.committed, *numbers_of(self.folder.store, "iterations")})

    def iteration(self, index: int) -> Iteration:
        """An iteration's files. Raises MissingFileError if it has not started, CorruptFileError if its records are broken."""
        kept = self._iterations.get(index)
        if kept:
            return kept
        store = self.folder.iteration(index)
        files = IterationFiles(self.folder, index)
        manifest = self._manifest(index) if index in self.committed else None
        if manifest:
            files.manifest = manifest  # checked above, also where an earlier one is broken
        entries = {entry.path: entry for entry in manifest.files} if manifest else self._open(files)
        tables = RangedTables(store, self._footers)
        found = Iteration(index, manifest is not None, entries, tables, files)
        if manifest:
            self._iterations[index] = found
            while len(self._iterations) > 8:
                self._iterations.popitem(last=False)
        return found

    def _open(self, files: IterationFiles) -> dict[str, FileEntry]:
        sizes = files.folder.sizes()
        if not sizes:
            raise MissingFileError(
                "has not started",
                where=f"iteration {iteration_number(files.index)}",
                remedy="name an earlier one",
            )
        files.manifest = None
        named = dict(files.entries)
        folders = {path.split("/")[0] for path in named}
        written = [
            path for kind in PART_FOLDERS if kind not in folders for path in list_parts(files.folder, kind)
        ]
        written += [path for path in sizes if path.startswith(f"{LOGPROBS}/") and LOGPROBS not in folders]
        for path in written:
            # a part is never written twice, so that its path stands for its content
            key = f"{files.folder.url_of(path)} of {sizes.get(path)}"
            if path in sizes:
                named[path] = FileEntry.model_construct(path=path, sha256=key, size=sizes[path])
        return named

    def _read_committed(self, problems: Problems) -> None:
        if not self._alone:
            try:
                for item in self.folder.committed(len(self.committed)):
                    self.committed[item.iteration] = item
                return
            except StorageError as error:
                problems.note(error)
                self._alone = True
        for index in numbers_of(self.folder.store, "iterations"):
            try:
                manifest = self._manifest(index)
            except StorageError as error:
                problems.note(error)
                self.committed.pop(index, None)
                continue
            if manifest and index not in self.committed:
                self.committed[index] = Committed.of(manifest)

    def _manifest(self, index: int) -> Manifest | None:
        """The manifest of an iteration, checked by its own hash; None if it has none."""
        if not self._alone:
            return self.folder.manifest(index)
        store = self.folder.iteration(index)
        try:
            content = store.read_json(MANIFEST)
        except MissingFileError:
            return None
        return manifest_of(content, index, store.url_of(MANIFEST))
