"""Whether a checkpoint is complete: its marker complete.json, and the record of the task that saved it.

Owns which marker counts, and how a broken checkpoint is set aside. Knows nothing of what its files hold.
"""

import logging
from typing import Any

from millrace.connectors.storage.files import FileEntry, recorded
from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.run_folder import ASIDE, COMPLETE, RunFolder, numbers_of
from millrace.core.errors import CorruptFileError

log = logging.getLogger(__name__)

REMEDY = (
    "restore the checkpoint from a copy, or remove its folder: the one before it is then taken, with replay"
)


def check_marker(run_folder: RunFolder, done: int, version: int | None = None) -> dict[str, Any]:
    """Read and check the marker of the checkpoint after `done` iterations; its `files` are the entries of the checkpoint's files.

    version: the weight version that it must hold. Raises MissingFileError if there is no marker, CorruptFileError if the marker
    changed since it was written or differs from the checkpoint task's record.
    """
    path = f"{run_folder.checkpoint_path(done)}/{COMPLETE}"
    store = run_folder.store
    recorded = _recorded(run_folder, done)
    if recorded is not None:
        store.read_json(path, recorded)
    marker = store.read_sealed(path)
    if version is not None and marker.get("version") != version:
        raise CorruptFileError(
            f"holds weight version {marker.get('version')}, not {version}",
            where=store.url_of(path),
            remedy=REMEDY,
        )
    return marker


def _recorded(run_folder: RunFolder, done: int) -> FileEntry | None:
    """The marker's entry in the record of the checkpoint task: of the same iteration, or of a later one if the checkpoint was
    written in the background."""
    wanted = run_folder.checkpoint_path(done)
    for index in numbers_of(run_folder.store, "iterations"):
        if index < done - 1:
            continue
        record = IterationFiles(run_folder, index).record("checkpoint") or {}
        for name, marker in (("saved", "marker"), ("committed", "committed_marker")):
            if record.get(name) == wanted and marker in record:
                return recorded(
                    [record[marker]], run_folder.iteration(index).url_of(record_path("checkpoint"))
                )[0]
        if index == done - 1 and "begun" not in record:
            return None
    return None


def checkpoint_files(run_folder: RunFolder, done: int, version: int | None = None) -> list[FileEntry]:
    """The entries of a checkpoint's files, relative to its folder, from its marker, which it checks like `check_marker`."""
    marker = check_marker(run_folder, done, version)
    store = run_folder.store.child(run_folder.checkpoint_path(done))
    return recorded(marker["files"], store.url_of(COMPLETE))


def unfinished_checkpoints(run_folder: RunFolder, before: int) -> list[int]:
    """Numbers of the checkpoints below `before` whose writers are gone, so that nobody completes them. Not those set aside."""
    complete = run_folder.complete_checkpoints()
    return [
        done
        for done in numbers_of(run_folder.store, "checkpoints")
        if done < before
        and done not in complete
        and not run_folder.store.exists(f"{run_folder.checkpoint_path(done)}/{ASIDE}")
    ]


def set_checkpoint_aside(run_folder: RunFolder, done: int) -> None:
    """Stop using a broken checkpoint: rename its marker, and keep its files."""
    folder = run_folder.store.child(run_folder.checkpoint_path(done))
    folder.write(ASIDE, folder.read(COMPLETE))
    folder.remove(COMPLETE)
    log.warning("%s: its marker is now %s; what was saved stays", folder.url, ASIDE)
