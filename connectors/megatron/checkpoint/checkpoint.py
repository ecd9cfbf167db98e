"""Trainer state on storage: models, optimizers, schedules, algorithm, RNG and weight version in megatron's torch_dist format.

Owns which files a checkpoint has, when it is complete and how it gets to and from object stores. A checkpoint loads
under any tensor, pipeline, context and data parallel layout.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException

from millrace.connectors.megatron.checkpoint.writer import SynchronousSave
from millrace.connectors.storage.store import FileEntry, Store
from millrace.core.errors import CorruptFileError, MillraceError, MissingFileError, StorageError, TrainerError

if TYPE_CHECKING:
    from millrace.connectors.megatron.rank import TrainerRank

COMPLETE = "complete.json"
FORMAT = 1


def save(rank: TrainerRank, url: str) -> dict[str, Any]:
    """Save this rank's share; rank 0 writes complete.json after all ranks are done. Every rank must call it.

    A complete checkpoint of the same version is left as it is; one of another version is refused; an incomplete one
    is replaced. Returns {"version", "bytes" (of all ranks), "seconds"}.
    """
    started, store = time.perf_counter(), Store(url)
    held = _once(lambda: _read_marker(store))
    if held is not None:
        if held["version"] != rank.version:
            raise StorageError(
                f"{url}: holds a complete checkpoint of weight version {held['version']}, not {rank.version}; "
                "a complete checkpoint is never overwritten: remove it, or save elsewhere"
            )
        return _answer(held, started)
    _once(lambda: store.remove("", recursive=True))
    with _write_folder(store) as folder:
        with torch.no_grad():
            state = _state(rank, loading=False)
            dist_checkpointing.save(state, str(folder), SynchronousSave("torch_dist", 1))
        mine = _together(lambda: _keep(store, folder))
    marker = {
        "format": FORMAT,
        "version": rank.version,
        "layout": {"world_size": rank.world_size, **rank.config.trainer.parallel.model_dump()},
        "distributed_optimizer": rank.config.trainer.optimizer.distributed,
        "parts": rank.learner.checkpoint_parts,
        "last": rank.last,
        "files": [entry.model_dump(include={"path", "size", "sha256"}) for part in mine for entry in part],
    }
    _once(lambda: store.write_json(COMPLETE, marker))
    return _answer(marker, started)


def load(rank: TrainerRank, url: str) -> int:
    """Load a complete checkpoint into this rank's model, optimizer and schedule; returns its weight version.

    Every rank must call it. Raises MissingFileError if it is not complete, CorruptFileError if a file is not as it was
    written, TrainerError if it was saved with another kind of optimizer.
    """
    store = Store(url)
    marker = _once(lambda: _read_marker(store))
    if marker is None:
        raise MissingFileError(
            f"{url}: no complete checkpoint is there; load another, or train from the start"
        )
    if marker["distributed_optimizer"] != rank.config.trainer.optimizer.distributed:
        raise TrainerError(
            f"{url}: was saved with trainer.optimizer.distributed={str(marker['distributed_optimizer']).lower()}; "
            "set it so to load the checkpoint"
        )
    for part in rank.learner.checkpoint_parts:
        if part not in marker.get("parts", []):
            raise TrainerError(
                f"{url}: was saved without a {part}, which the algorithm needs; load another, or train from the start"
            )
    with _read_folder(store, marker) as folder, torch.no_grad():
        try:
            loaded = dist_checkpointing.load(_state(rank, loading=True), str(folder))
        except (CheckpointingException, KeyError) as error:
            raise TrainerError(
                f"{url}: does not fit the model that the configuration names: {error}"
            ) from error
        rank.learner.load_state(loaded)
        _set_rng(loaded["rng"])
    rank.remember(marker["last"])
    return int(loaded["version"])


def _state(rank: TrainerRank, *, loading: bool) -> dict[str, Any]:
    """The sharded state dict, with what is alike on every rank when it is saved."""
    state = rank.learner.sharded_state(loading=loading)
    if loading:
        return state
    return {**state, **rank.learner.common_state(), "rng": _rng(), "version": rank.version}


def _rng() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


# files


@contextlib.contextmanager
def _write_folder(store: Store) -> Iterator[Path]:
    """Where this rank writes: the place itself on a local disk, a folder of its own before an object store."""
    if store.local:
        _once(lambda: Path(store.root).mkdir(parents=True, exist_ok=True))
        yield Path(store.root)
    else:
        with tempfile.TemporaryDirectory(prefix="millrace-save-") as folder:
            yield Path(folder)


def _keep(store: Store, folder: Path) -> list[FileEntry]:
    """Bring the files that this rank wrote to the store; their entries."""
    if not store.local:
        return [
            entry.model_copy(update={"path": entry.path.lstrip("/")})
            for entry in store.upload_dir(str(folder), "")
        ]
    number = dist.get_rank()
    names = [path.name for path in folder.iterdir()]
    mine = [name for name in names if name.startswith(f"__{number}_")]
    if number == 0:
        mine += [name for name in names if not name.startswith("__")]
    return store.entries(sorted(mine))


@contextlib.contextmanager
def _read_folder(store: Store, marker: dict[str, Any]) -> Iterator[Path]:
    """A local folder with the checkpoint's files, checked; one copy a host where they come from an object store."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    number = dist.get_rank()
    if store.local:
        entries = [FileEntry(**file) for file in marker["files"]]
        _together(lambda: [store.verify(entry) for entry in entries[number :: len(hosts)]])
        yield Path(store.root)
        return
    first = hosts.index(hosts[number]) == number
    with tempfile.TemporaryDirectory(prefix="millrace-load-") if first else contextlib.nullcontext("") as own:
        _together(lambda: _fetch(store, marker, own) if first else None)
        folders: list[Any] = [None] * len(hosts)
        dist.all_gather_object(folders, own)
        yield Path(folders[hosts.index(hosts[number])])
        dist.barrier()  # the copy is removed when nobody reads it any more


def _fetch(store: Store, marker: dict[str, Any], folder: str) -> None:
    store.download_dir("", folder)
    here = Store(folder)
    for file in marker["files"]:
        here.verify(FileEntry(**file))


def _read_marker(store: Store) -> dict[str, Any] | None:
    try:
        marker: dict[str, Any] = store.read_json(COMPLETE)
    except MissingFileError:
        return None
    if marker.get("format") != FORMAT:
        raise CorruptFileError(
            f"{store.url_of(COMPLETE)}: of format {marker.get('format')}, wanted {FORMAT}; "
            "load it with the release that wrote it"
        )
    return marker


def _answer(marker: dict[str, Any], started: float) -> dict[str, Any]:
    return {
        "version": marker["version"],
        "bytes": sum(file["size"] for file in marker["files"]),
        "seconds": time.perf_counter() - started,
    }


# what all ranks do together: one rank's failure is raised on every rank, so that none waits for it


def _together(call: Callable[[], Any]) -> list[Any]:
    """Every rank's result, in rank order."""
    result: Any = None
    failure: MillraceError | None = None
    try:
        result = call()
    except (MillraceError, OSError) as error:
        failure = error if isinstance(error, MillraceError) else StorageError(str(error))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (result, failure))
    for _, problem in everywhere:
        if problem is not None:
            raise problem
    return [value for value, _ in everywhere]


def _once(call: Callable[[], Any]) -> Any:
    """Rank 0's result, on every rank."""
    return _together(call if dist.get_rank() == 0 else lambda: None)[0]
