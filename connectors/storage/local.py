"""Local disks: atomic writes (temporary file, fsync, rename, fsync of the folder), a lock file, and the places of logs.

Owns the names of files that are still being written. Knows nothing of stores.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

ASIDE = ".aside-"


def write_whole(target: Path, blocks: Iterable[bytes]) -> None:
    """Write the blocks as one file. After a crash at any moment the file is the old one or the new one."""
    make_folder(target.parent)
    aside = target.with_name(f"{ASIDE}{uuid.uuid4().hex}")
    try:
        with aside.open("wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, so that they survive a power cut."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _sync_folder(made.parent)


def sweep(folder: Path, older_than_s: float) -> list[Path]:
    """Remove temporary files of interrupted writes below a folder; returns their paths.

    Keeps files younger than `older_than_s`: another process may still write them.
    """
    removed = []
    for aside in folder.rglob(f"{ASIDE}*"):
        try:
            if time.time() - aside.stat().st_mtime >= older_than_s:
                aside.unlink()
                removed.append(aside)
        except FileNotFoundError:
            continue  # its writer finished
    return removed


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, no other process of this host holds the lock. A process that dies releases it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def library_log() -> Path:
    """The file to which a command sends what native libraries and its child processes write to stderr."""
    return Path(os.environ.get("MILLRACE_HOME", "~/.millrace")).expanduser() / "stderr.log"


def log_folder(root: str, run: str) -> Path:
    """Where the processes of a run on this host write their logs.

    In the run's folder if this host has it. Else, as with a run in an object store, in MILLRACE_HOME: logs are appended
    to line by line, which no object store can.
    """
    path = root.removeprefix("file://")
    if "://" not in path and (folder := Path(path).expanduser().absolute() / run).is_dir():
        return folder / "logs"
    key = hashlib.sha256(root.encode()).hexdigest()[:8]
    return library_log().parent / "logs" / f"{run}-{key}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
