"""The local folder that a rank saves to and loads from, and the transfer of files to and from object stores.

Owns which rank transfers which file, and the calls that all ranks make together: one rank's failure is raised on every rank, so
that no rank waits for it. Knows nothing of what the files hold.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from millrace.connectors.host.own_folders import temporary_folder
from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.store import Store
from millrace.core.errors import MillraceError, StorageError

Result = TypeVar("Result")


def on_every_rank(call: Callable[[], Result]) -> list[Result]:
    """The results of every rank's call, in rank order."""
    result: Result | None = None
    failure: MillraceError | None = None
    try:
        result = call()
    except (MillraceError, OSError) as error:
        failure = error if isinstance(error, MillraceError) else StorageError(str(error))
    outcomes: list[tuple[Result, MillraceError | None] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure))
    results = []
    for outcome in outcomes:
        assert outcome is not None
        if outcome[1] is not None:
            raise outcome[1]
        results.append(outcome[0])
    return results


def on_rank_0(call: Callable[[], Result]) -> Result:
    """The result of rank 0's call, on every rank."""
    results = on_every_rank(lambda: call() if dist.get_rank() == 0 else None)
    return cast(Result, results[0])


@contextlib.contextmanager
def write_folder(store: Store) -> Iterator[Path]:
    """The folder that this rank writes to: the checkpoint's if it is on a local disk, otherwise a temporary one."""
    if store.local:
        on_rank_0(lambda: Path(store.root).mkdir(parents=True, exist_ok=True))
        yield Path(store.root)
    else:
        with temporary_folder("millrace-save") as folder:
            yield Path(folder)


def store_files(store: Store, folder: Path) -> list[FileEntry]:
    """Transfer the files that this rank wrote to the store; returns their entries."""
    if not store.local:
        return store.upload_dir(str(folder), "")
    rank = dist.get_rank()
    names = [path.name for path in folder.iterdir()]
    written = [name for name in names if name.startswith(f"__{rank}_")]
    if rank == 0:
        written += [name for name in names if not name.startswith("__")]
    return store.entries(sorted(written))


@contextlib.contextmanager
def read_folder(store: Store, files: list[FileEntry]) -> Iterator[Path]:
    """A local folder with the checkpoint's verified files. Files in an object store are copied once per host."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    rank = dist.get_rank()
    if store.local:
        on_every_rank(lambda: _verify(store, files[rank :: len(hosts)]))
        yield Path(store.root)
        return
    first = hosts.index(hosts[rank]) == rank
    temporary = temporary_folder("millrace-load") if first else contextlib.nullcontext("")
    with temporary as folder:
        on_every_rank(lambda: _download(store, files, folder) if first else None)
        folders: list[Any] = [None] * len(hosts)
        dist.all_gather_object(folders, folder)
        yield Path(folders[hosts.index(hosts[rank])])
        dist.barrier()  # the copy is removed afterwards, so all ranks must have read it


def _download(store: Store, files: list[FileEntry], folder: str) -> None:
    store.download_dir("", folder, [entry.path for entry in files])
    _verify(Store(folder), files)


def _verify(store: Store, files: list[FileEntry]) -> None:
    in_threads(store.verify, files)
