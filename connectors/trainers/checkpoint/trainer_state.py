"""Trainer state on storage: models, optimizers, schedules, algorithm, RNG and weight version, in files of torch.distributed.checkpoint.

Owns which files a checkpoint has and when it is complete. Which tensors they hold is the learner's.
"""

import contextlib
import time
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemWriter

from millrace.connectors.storage.files import FileEntry, recorded
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.checkpoint.background import BackgroundWriter, Begun
from millrace.connectors.trainers.checkpoint.folders import (
    on_every_rank,
    on_rank_0,
    read_folder,
    store_files,
    write_folder,
)
from millrace.connectors.trainers.checkpoint.host_copy import CopyingWriter
from millrace.connectors.trainers.checkpoint.stored_metadata import LOAD_ANOTHER
from millrace.connectors.trainers.learner import Learner
from millrace.core.contracts.task_records import StepMetrics
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError, TrainerError

COMPLETE = "complete.json"
FORMAT = 1


class Loaded(NamedTuple):
    """The content of a checkpoint beside the learner's state."""

    version: int
    metrics: StepMetrics | None  # of the step that made the version


def save(learner: Learner, url: str, version: int, metrics: StepMetrics | None) -> None:
    """Save this rank's shards; rank 0 writes complete.json after all ranks are done. Every rank must call it.

    Keeps a complete checkpoint of the same version, refuses to overwrite one of another version, and replaces an
    incomplete one. `metrics`: of the step that made the version.
    """
    store = Store(url)
    if _has_complete(store, version):
        return
    with write_folder(store) as folder:
        with torch.no_grad():
            learner.write(folder, version)
        files_of_ranks = on_every_rank(lambda: store_files(store, folder))
    _write_marker(learner, store, version, metrics, files_of_ranks)


def begin(
    learner: Learner, url: str, version: int, metrics: StepMetrics | None, writer: BackgroundWriter
) -> None:
    """Copy this rank's shards to host memory and start to write them. Every rank must call it, and then `commit`.

    A complete checkpoint of the same version is kept, as by `save`; then there is nothing to commit.
    """
    started, store = time.perf_counter(), Store(url)
    if _has_complete(store, version):
        return
    with contextlib.ExitStack() as keeps:
        folder = keeps.enter_context(write_folder(store))
        copying = CopyingWriter(folder, writer.memory)
        with torch.no_grad():
            learner.write(folder, version, copying)
        assert copying.copy is not None
        seconds = time.perf_counter() - started
        begun = Begun(url, version, metrics, folder, copying.metadata, seconds, keeps.pop_all())
    writer.start(begun, copying.copy)


def commit(learner: Learner, writer: BackgroundWriter) -> None:
    """Wait for every rank's files; then rank 0 writes complete.json. Every rank must call it.

    Raises StorageError, on every rank, if a rank could not write its files.
    """
    begun = writer.begun
    assert begun is not None, "begin comes first"
    store = Store(begun.url)
    written = on_every_rank(writer.written)

    def finish() -> list[FileEntry]:
        if begun.metadata is None:
            return []
        FileSystemWriter(begun.folder).finish(begun.metadata, [rank.results for rank in written])
        if not store.local:
            return store.upload_dir(str(begun.folder), "")
        return store.entries(
            sorted(path.name for path in begun.folder.iterdir() if not path.name.startswith("__"))
        )

    common = on_every_rank(finish)
    files = [[*own.files, *shared] for own, shared in zip(written, common, strict=True)]
    _write_marker(learner, store, begun.version, begun.metrics, files)


def _has_complete(store: Store, version: int) -> bool:
    """Whether there is a complete checkpoint of this version. Removes what an interrupted save left."""
    existing = on_rank_0(lambda: _read_marker(store))
    if existing is None:
        on_rank_0(lambda: store.remove("", recursive=True))
    elif existing["version"] != version:
        raise StorageError(
            f"holds a complete checkpoint of weight version {existing['version']}, not {version}, and a complete "
            "checkpoint is never overwritten",
            where=store.url,
            remedy="remove its folder and start the run again: it is saved again",
        )
    return existing is not None


def _write_marker(
    learner: Learner,
    store: Store,
    version: int,
    metrics: StepMetrics | None,
    files_of_ranks: list[list[FileEntry]],
) -> None:
    marker = {
        "format": FORMAT,
        "version": version,
        **learner.marked(),
        "parts": learner.checkpoint_parts,
        "last": metrics,
        "files": [
            file.model_dump(include={"path", "size", "sha256"}) for files in files_of_ranks for file in files
        ],
    }
    on_rank_0(lambda: store.write_sealed(COMPLETE, marker))


def load(learner: Learner, url: str) -> Loaded:
    """Load a complete checkpoint into the learner's models, optimizers and schedules. Every rank must call it.

    Raises MissingFileError if the checkpoint is not complete, CorruptFileError if a file has changed since it was written,
    TrainerError if it was saved with another kind of optimizer.
    """
    store = Store(url)
    marker = on_rank_0(lambda: _read_marker(store))
    if marker is None:
        raise MissingFileError("no complete checkpoint is there", where=url, remedy=LOAD_ANOTHER)
    learner.check_marked(marker, url)
    for part in learner.checkpoint_parts:
        if part not in marker.get("parts", []):
            raise TrainerError(
                f"was saved without a {part}, which the algorithm needs", where=url, remedy=LOAD_ANOTHER
            )
    files = recorded(marker["files"], store.url_of(COMPLETE))
    with read_folder(store, files) as folder, torch.no_grad():
        version = learner.read(folder, {file.path for file in files}, marker, url)
    return Loaded(version, marker["last"])


def _read_marker(store: Store) -> dict[str, Any] | None:
    try:
        marker = store.read_sealed(COMPLETE)
    except MissingFileError:
        return None
    if marker.get("format") != FORMAT:
        raise CorruptFileError(
            f"of format {marker.get('format')}, wanted {FORMAT}",
            where=store.url_of(COMPLETE),
            remedy="load it with the millrace that wrote it",
        )
    return marker
