"""Temporary folders that are removed after their process: in shared memory, the temporary folder, or beside a run's weights.

A process locks each of its folders. A folder without a lock belongs to a dead process, even one of another container.
Owns the folders' names; knows nothing of what is in them.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
NAMED = re.compile(r"^millrace-.+-(\d+)\.[a-z0-9_]{8}$")  # with the pid of the process that created it
_locks: dict[str, int] = {}  # descriptors of the locks that this process holds, by folder


def own_folder(prefix: str, where: str | None = None) -> str:
    """Create a folder for this process, in `where` or in shared memory. Removes folders that dead processes left there.

    prefix: must start with `millrace-`.
    """
    place = where or str(SHARED_MEMORY if SHARED_MEMORY.is_dir() else tempfile.gettempdir())
    remove_dead_folders(place)
    while True:
        folder = tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}.", dir=place)
        assert NAMED.match(Path(folder).name), folder
        if _lock(folder):
            return folder


def remove_own_folder(folder: str) -> None:
    """Remove a folder of this process, if it exists."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


@contextlib.contextmanager
def temporary_folder(prefix: str, where: str | None = None) -> Iterator[str]:
    """Create a folder for this process, in `where` or in the temporary folder; it is removed at the end of the context."""
    folder = own_folder(prefix, where or tempfile.gettempdir())
    try:
        yield folder
    finally:
        remove_own_folder(folder)


def remove_dead_folders(*places: str | Path) -> list[Path]:
    """Remove this user's folders of dead processes; by default in shared memory and in the temporary folder."""
    removed = []
    for place in places or {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for folder in Path(place).glob("millrace-*"):
            named = NAMED.match(folder.name)
            if named and str(folder) not in _locks and _is_dead(folder, int(named[1])):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _lock(folder: str) -> bool:
    """Lock a new folder until this process ends. False if another process took it for a dead process's and removed it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    # on a network file system without locks the pid alone decides
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if not Path(folder).is_dir():
        os.close(handle)
        return False
    _locks[folder] = handle
    return True


def _is_dead(folder: Path, pid: int) -> bool:
    """True if no process holds the folder's lock, and no process with its pid is old enough to have created it."""
    try:
        state = folder.stat()
        if state.st_uid != os.getuid():
            return False
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False  # another process removed it
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not psutil.pid_exists(pid)
    finally:
        os.close(handle)
    try:
        return psutil.Process(pid).create_time() > state.st_mtime
    except psutil.NoSuchProcess:
        return True
