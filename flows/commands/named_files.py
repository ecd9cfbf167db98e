"""Which files of a run are named, and which are strangers; whether a file matches its entry."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from millrace.connectors.storage.checkpoint_files import checkpoint_files
from millrace.connectors.storage.files import FileEntry, recorded
from millrace.connectors.storage.iteration_files import OF_SOME, PUBLISH, TABLES, IterationFiles, record_path
from millrace.connectors.storage.parts import PART_FOLDERS, list_notes, list_parts
from millrace.connectors.storage.run_folder import (
    COMPLETE,
    EAGER,
    LOGPROBS,
    MANIFEST,
    RECORD,
    TRACES,
    RunFolder,
    open_iterations,
)
from millrace.core.contracts.task_records import IterationRecords
from millrace.core.errors import StorageError

OF_THE_RUN = ("run.json", "quarantine.parquet")
# files that millrace discard moved, engine logs, the claims of drivers, traces for Perfetto
NOT_OF_ITERATIONS = ("discarded/", "logs/", "lease/", f"{TRACES}/")


def named_by_records(folder: RunFolder, index: int) -> Iterator[FileEntry]:
    """Evaluations, pictures and exports that the records of an iteration name, relative to the run's folder.

    Raises MissingFileError or CorruptFileError for a missing or corrupt record.
    """
    files = IterationFiles(folder, index)
    for task in ("evaluate_before", "evaluate", "held_out_loss_before", "held_out_loss"):
        record, where = files.record(task) or {"sets": {}}, files.folder.url_of(record_path(task))
        yield from recorded((held_out["file"] for held_out in record["sets"].values()), where)
        yield from recorded(record.get("images", ()), where)
    for task in ("sample_prompts", "sample_supervised"):
        drawn = files.record(task) or {}
        yield from recorded(drawn.get("images", ()), files.folder.url_of(record_path(task)))
    saved = files.record("checkpoint") or {}
    where = files.folder.url_of(record_path("checkpoint"))
    entries = recorded(saved.get("export_files", ()), where)
    placed = ({**entry.record(), "path": f"{saved['exported']}/{entry.path}"} for entry in entries)
    yield from recorded(placed, where)


def check_file(path: Path) -> None:
    """Raise CorruptFileError if a file of a run does not match its entry: in a manifest, in a record, or the hash in its name.

    A file without an entry passes, and so does a file outside of runs.
    """
    path = path.absolute()
    above = next((folder for folder in path.parents if (folder / RECORD).is_file()), None)
    if above is None or not path.is_file():
        return
    run, inside = RunFolder(str(above.parent), above.name), path.relative_to(above).as_posix()
    named = {entry.path: entry for entry in _around(run, inside)}
    run.store.verify(named.get(inside) or run.store.entry(inside))


def _around(run: RunFolder, inside: str) -> Iterator[FileEntry]:
    """The entries of the iterations that may name a file: the iteration in its path, and the previous one."""
    number = re.search(r"/(\d{6,})[./]", inside)
    for index in range(max(0, int(number[1]) - 1), int(number[1]) + 1) if number else ():
        yield from named_by_records(run, index)
        for entry in IterationFiles(run, index).entries.values():
            yield entry.model_copy(update={"path": f"{run.iteration_path(index)}/{entry.path}"})


def strangers(folder: RunFolder, named: Iterable[FileEntry]) -> list[str]:
    """Files in a run's folder that no manifest, record or marker names. `named`: entries of records.

    Files of tasks of open iterations count as named: their records follow.
    """
    known = {*OF_THE_RUN, *(entry.path for entry in named)}
    for index in [*range(folder.first_open_iteration()), *open_iterations(folder)]:
        known |= {f"{folder.iteration_path(index)}/{path}" for path in _of_iteration(folder, index)}
    for done in folder.complete_checkpoints():
        known |= {f"{folder.checkpoint_path(done)}/{path}" for path in _of_checkpoint(folder, done)}
    return [
        path for path in folder.store.list() if path not in known and not path.startswith(NOT_OF_ITERATIONS)
    ]


def _of_iteration(folder: RunFolder, index: int) -> list[str]:
    manifest = folder.manifest(index)
    if manifest:
        return [MANIFEST, record_path(PUBLISH), *(entry.path for entry in manifest.files)]
    files = IterationFiles(folder, index)
    named = [
        *TABLES,
        *OF_SOME,
        *list_notes(files.folder),
        *files.folder.list(EAGER),
        *map(record_path, IterationRecords.__annotations__),
    ]
    for kind in (*PART_FOLDERS, LOGPROBS):
        parts = [path for path in _entries(files) if path.startswith(f"{kind}/")]
        named += parts or (files.folder.list(kind) if kind == LOGPROBS else list_parts(files.folder, kind))
    return named


def _entries(files: IterationFiles) -> list[str]:
    try:
        return list(files.entries)
    except StorageError:
        return []  # verify reports a broken record as a problem


def _of_checkpoint(folder: RunFolder, done: int) -> list[str]:
    try:
        return [
            COMPLETE,
            *(entry.path for entry in checkpoint_files(folder, done)),
        ]
    except StorageError:
        return [COMPLETE]  # verify reports a broken marker as a problem
