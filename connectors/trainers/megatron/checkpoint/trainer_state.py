"""Trainer state on storage: models, optimizers, schedules, algorithm, RNG and weight version, in megatron's torch_dist format.

Owns which files a checkpoint has and when it is complete. A checkpoint loads under any layout of tensor, pipeline, context,
expert and data parallelism.
"""

import contextlib
import time
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from millrace.connectors.storage.files import FileEntry, recorded
from millrace.connectors.storage.sampled_hash import sampled_hash
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.megatron.checkpoint.background import BackgroundWriter, Begun
from millrace.connectors.trainers.megatron.checkpoint.file_writer import SynchronousSave
from millrace.connectors.trainers.megatron.checkpoint.folders import (
    on_every_rank,
    on_rank_0,
    read_folder,
    store_files,
    write_folder,
)
from millrace.connectors.trainers.megatron.checkpoint.host_copy import CopyingWriter
from millrace.connectors.trainers.megatron.checkpoint.stored_metadata import (
    LOAD_ANOTHER,
    as_data,
    read_metadata,
)
from millrace.connectors.trainers.megatron.learner import Learner
from millrace.connectors.trainers.megatron.patches import checkpoints_read_as_data
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
            state = _state_to_save(learner, version)
            dist_checkpointing.save(state, str(folder), SynchronousSave("torch_dist", 1))
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
            state = _state_to_save(learner, version)
            dist_checkpointing.save(state, str(folder), SynchronousSave("torch_dist", 1, writer=copying))
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
    trainer = learner.config.trainer
    marker = {
        "format": FORMAT,
        "version": version,
        "layout": {"world_size": dist.get_world_size(), **trainer.parallel.model_dump()},
        "distributed_optimizer": trainer.optimizer.distributed,
        "parts": learner.checkpoint_parts,
        **({"base": _base(learner)} if learner.policy.inner.adapted else {}),
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
    if marker["distributed_optimizer"] != learner.config.trainer.optimizer.distributed:
        raise TrainerError(
            f"was saved with trainer.optimizer.distributed={str(marker['distributed_optimizer']).lower()}",
            where=url,
            remedy="set it so to load the checkpoint",
        )
    for part in learner.checkpoint_parts:
        if part not in marker.get("parts", []):
            raise TrainerError(
                f"was saved without a {part}, which the algorithm needs", where=url, remedy=LOAD_ANOTHER
            )
    _check_base(learner, marker, url)
    files = recorded(marker["files"], store.url_of(COMPLETE))
    with read_folder(store, files) as folder, torch.no_grad():
        try:
            state = _read_state(learner, folder, {file.path for file in files})
        except (CheckpointingException, KeyError) as error:
            raise TrainerError(
                f"does not fit the configured model: {error}",
                where=url,
                remedy="load it with the model that it was saved from",
            ) from error
        learner.load_state(state)
        torch.set_rng_state(state["rng"]["cpu"])
        if torch.cuda.is_available() and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"])
    return Loaded(int(state["version"]), marker["last"])


def _base(learner: Learner) -> dict[str, str]:
    """The hashes of the files that hold the weights beside the adapters."""
    folder = Path(learner.config.model.path)
    return {path.name: sampled_hash(path) for path in sorted(folder.glob("*.safetensors"))}


def _check_base(learner: Learner, marker: dict[str, Any], url: str) -> None:
    """Raise TrainerError, on every rank, unless a checkpoint of adapters meets the weights that it belongs to, and no other does."""
    now = on_rank_0(lambda: _base(learner)) if learner.policy.inner.adapted else None
    stored = marker.get("base")
    if stored == now:
        return
    if stored is None or now is None:
        holds = "all weights" if stored is None else "adapters alone"
        raise TrainerError(
            f"holds {holds}", where=url, remedy="set trainer.lora as the run had it that saved the checkpoint"
        )
    name = min(name for name in stored.keys() | now.keys() if stored.get(name) != now.get(name))
    raise TrainerError(
        f"its adapters belong to another {name} than that of model.path = {learner.config.model.path}",
        where=url,
        remedy="name the model that they were trained beside",
    )


def _read_state(learner: Learner, folder: Path, files: set[str]) -> dict[str, Any]:
    """The stored state, read as data: no name in a file is imported or called.

    Raises CorruptFileError, before anything is loaded, if the table of contents names code; TrainerError if an object does.
    """
    metadata = on_every_rank(lambda: read_metadata(folder, files))[dist.get_rank()]
    try:
        with checkpoints_read_as_data(metadata, as_data):
            state: dict[str, Any] = dist_checkpointing.load(learner.sharded_state(loading=True), str(folder))
            return state
    except UnpicklingError as error:
        raise _unreadable(folder, error) from error
    except CheckpointException as error:  # raised on every rank if any rank fails
        raise _unreadable(folder, next((failure for failure, _ in error.failures.values()), error)) from error


def _unreadable(folder: Path, error: BaseException) -> TrainerError:
    reason = str(error).partition("\n")[0]
    if isinstance(error, UnpicklingError):
        reason = f"a file of it holds more than data: {reason}"
    return TrainerError(f"cannot be loaded: {reason}", where=str(folder), remedy=LOAD_ANOTHER)


def _state_to_save(learner: Learner, version: int) -> dict[str, Any]:
    """The sharded state dict, with the state that is the same on every rank."""
    sharded = learner.sharded_state(loading=False)
    return {**sharded, **learner.common_state(), "rng": _rng(), "version": version}


def _rng() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


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
