"""The committed files of an iteration: those named by its manifest, or by its tasks' records before there is a manifest.

Owns two rules: no other file in the folder counts, and reading a file checks it against its entry.
Knows nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import pyarrow as pa

from millrace.connectors.storage.conditional import RUN, check_seal
from millrace.connectors.storage.files import FileEntry, in_threads, recorded
from millrace.connectors.storage.manifests.manifest import JOINED, Manifest
from millrace.connectors.storage.manifests.summaries import SUMMARY, has_summary
from millrace.connectors.storage.parts import PART_FOLDERS, list_notes, read_parts
from millrace.connectors.storage.run_folder import CUT, DEFERRED, LOGPROBS, MAKE_AGAIN, MANIFEST, RunFolder
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.task_records import EvaluatedMetrics, IterationRecords
from millrace.core.errors import CorruptFileError, MissingFileError, of_run

TABLES = ("prompts.parquet", "verdicts.parquet", "batch.parquet", "step.json")
OF_SOME = (JOINED, CUT, DEFERRED, SUMMARY)  # the first three only if groups are deferred
log = logging.getLogger(__name__)

PUBLISH = "publish"  # the task whose record is written after the manifest


class IterationFiles:
    """One iteration's files, as its manifest or its records name them. Reads storage on demand, and checks what it reads.

    Every read raises MissingFileError if the file is gone or nothing names it, CorruptFileError if it changed.
    """

    def __init__(self, run_folder: RunFolder, index: int) -> None:
        self.index = index
        self.folder = run_folder.iteration(index)
        self._run_folder = run_folder

    @property
    def before(self) -> IterationFiles:
        """The files of the previous iteration."""
        return IterationFiles(self._run_folder, self.index - 1)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest; None while the iteration is open."""
        return self._run_folder.manifest(self.index)

    @cached_property
    def entries(self) -> dict[str, FileEntry]:
        """The entries of all named files, by path."""
        if self.manifest:
            return {entry.path: entry for entry in self.manifest.files}
        named: dict[str, FileEntry] = {}
        tasks = self.recorded_tasks()
        for task, record in zip(tasks, in_threads(self.record, tasks), strict=True):
            entries = recorded((record or {}).get("files", ()), self.folder.url_of(record_path(task)))
            named |= {entry.path: entry for entry in entries}
        return named

    def recorded_tasks(self) -> list[str]:
        """The tasks that have a record in this iteration."""
        names = list(IterationRecords.__annotations__)
        # an object store's listing may lack what another process just wrote
        there = set(
            self.folder.list("results")
            if self.folder.local
            else self.folder.existing(map(record_path, names))
        )
        return [name for name in names if record_path(name) in there]

    def record(self, task: str) -> dict[str, Any] | None:
        """The record of a task; None if it has none, or if its record does not count."""
        path = record_path(task)
        named = None
        if self.manifest and task != PUBLISH:
            named = next((entry for entry in self.manifest.files if entry.path == path), None)
            if named is None:
                return None
        with self.with_remedy():
            try:
                content = self.folder.read_json(path, named)
            except MissingFileError:
                if named:
                    raise
                return None
            url = self.folder.url_of(path)
            result = result_of(content, url)
            self._run_folder.owner.check(content.get(RUN), url)
            return result

    def entry(self, path: str) -> FileEntry:
        """The entry of a file."""
        with self.with_remedy():
            if path not in self.entries:
                raise MissingFileError("nothing that is committed names it", where=self.folder.url_of(path))
            return self.entries[path]

    def read_json(self, path: str) -> Any:
        """A JSON file."""
        with self.with_remedy():
            return self.folder.read_json(path, self.entry(path))

    def read_table(self, kind: str, columns: list[str] | None = None, path: str = "") -> pa.Table:
        """The iteration's table of a kind; `path` if it is not named after its kind."""
        path = path or f"{kind}.parquet"
        with self.with_remedy():
            return self.folder.read_table(path, kind, self.entry(path), columns)

    def read_deferred(self, columns: list[str] | None = None) -> pa.Table | None:
        """Finished samples of the groups that the iteration deferred; None if it deferred none."""
        return self.read_table("rollouts", columns, DEFERRED) if DEFERRED in self.entries else None

    def read_parts(self, kind: str, columns: list[str] | None = None) -> pa.Table:
        """All rows of the parts of a kind, in the order of their paths."""
        named = sorted(self.entries.values(), key=lambda entry: entry.path)
        with self.with_remedy():
            return read_parts(self.folder, kind, kind, columns=columns, entries=named)

    def check(self, entries: list[FileEntry]) -> None:
        """Compare files with their entries."""
        with self.with_remedy():
            in_threads(self.folder.verify, entries)

    @contextlib.contextmanager
    def with_remedy(self) -> Iterator[None]:
        """Give errors about a file the remedy that works without a copy of the file."""
        try:
            yield
        except (MissingFileError, CorruptFileError) as error:
            error.remedy = self._remedy
            raise

    @property
    def _remedy(self) -> str:
        run = self._run_folder
        if "manifest" in self.__dict__ and self.manifest:
            return (
                "restore it from a copy; without one, go on from a checkpoint before it: "
                f"`millrace branch {of_run(run.name, run.store.url, 'NEW', '--at ITERATION')}`"
            )
        return f"restore it from a copy, or {way_out(run, self.index)}"


def way_out(run: RunFolder, index: int) -> str:
    """The remedy for an open iteration that cannot continue."""
    number = iteration_number(index)
    return f"give the iteration up: `millrace discard {of_run(run.name, run.store.url, f'--from {number}')}`"


def record_path(task: str) -> str:
    """Path of a task's record below its iteration's folder."""
    return f"results/{task}.json"


def result_of(content: Any, url: str) -> dict[str, Any]:
    """A task's return value, from its record as Prefect stores it. Raises CorruptFileError if the record changed."""
    try:
        result = json.loads(check_seal(content, url)["result"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError("is not the record of a task", where=url) from error
    if not isinstance(result, dict):
        raise CorruptFileError("is not the record of a task", where=url)
    return result


def manifest_from_records(
    run_folder: RunFolder,
    index: int,
    metrics: dict[str, float],
    committed: float,
    driver: int | None,
    run: str | None,
    evaluated: EvaluatedMetrics | None = None,
    worked: Mapping[str, list[float]] | None = None,
) -> Manifest:
    """Build the manifest of an open iteration from its records, with all files that they name. Checks each file.

    metrics: of the iteration. committed: seconds of the epoch. driver: its token. run: its id. evaluated: the evaluation of the
    weights that the iteration started with. worked: start and end of each task, seconds of the epoch.
    """
    files = IterationFiles(run_folder, index)
    assert files.manifest is None, "the iteration is open"
    tasks = [task for task in files.recorded_tasks() if task != PUBLISH]
    named = dict(files.entries)
    trained = files.record("train_step")
    assert trained is not None, "train_step comes before the manifest"
    if has_summary(index):
        named[SUMMARY] = run_folder.summaries.write(index)
    files.check(list(named.values()))
    order = [
        *TABLES,
        *(path for path in OF_SOME if path in named),
        *(
            path
            for folder in (*PART_FOLDERS, LOGPROBS)
            for path in sorted(named)
            if path.startswith(f"{folder}/")
        ),
    ]
    return Manifest(
        iteration=index,
        run=run,
        files=[
            *(named[path] for path in order),
            *files.folder.entries([*list_notes(files.folder), *sorted(record_path(task) for task in tasks)]),
        ],
        tasks={
            "trained_version": trained["version"],
            "metrics": metrics,
            "committed": committed,
            **({} if driver is None else {"driver": driver}),
            **({} if evaluated is None else {"evaluated": evaluated}),
            **({"worked": worked} if worked else {}),
        },
    )


def commit_again(run_folder: RunFolder) -> list[int]:
    """Commit published iterations again whose manifest is gone, from their records; returns their indices.

    Also compares the newest manifest with publish's record of it. Raises CorruptFileError or MissingFileError if a manifest
    cannot be rebuilt exactly.
    """
    restored: list[int] = []
    while True:
        index = run_folder.first_open_iteration(strict=False)
        if index and index - 1 not in restored and _published(run_folder, index - 1):
            check_newest(run_folder, index - 1)
        record = _published(run_folder, index)
        if record is None:
            # raises if later iterations are committed, since this one cannot be rebuilt
            run_folder.first_open_iteration()
            return restored
        manifest = manifest_from_records(
            run_folder,
            index,
            record["metrics"],
            record["committed"],
            record["driver"],
            record["run"],
            evaluated=record.get("evaluated"),
            worked=record.get("worked"),
        )
        run_folder.commit_manifest(index, manifest, expected=record["manifest"])
        log.warning(
            "the manifest of iteration %d was gone; it is made again from the iteration's records",
            iteration_number(index),
        )
        restored.append(index)


def _published(run_folder: RunFolder, index: int) -> dict[str, Any] | None:
    """The record of publish. A changed one is removed: while the manifest exists, nothing is read from it."""
    files = IterationFiles(run_folder, index)
    try:
        return files.record(PUBLISH)
    except CorruptFileError as error:
        log.warning("removing a broken record: %s", error)
        files.folder.remove(record_path(PUBLISH))
        return None


def check_newest(run_folder: RunFolder, index: int) -> None:
    """Compare the newest manifest with publish's record of it. Older manifests are checked by the next manifest's hash.

    Raises CorruptFileError if they differ.
    """
    record = IterationFiles(run_folder, index).record(PUBLISH)
    manifest = run_folder.manifest(index)
    assert manifest is not None, "it is committed"
    if record and record.get("manifest", manifest.sha256) != manifest.sha256:
        raise CorruptFileError(
            "is not the manifest that publish recorded",
            where=run_folder.iteration(index).url_of(MANIFEST),
            remedy=MAKE_AGAIN,
        )
