"""Local disks: atomic writes (temporary file, fsync, rename, fsync of the folder), lock files, and folders for logs.

Owns the names of files that are still being written. Knows nothing of stores.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from millrace.core.errors import ConfigError, StalledError, StorageError

ASIDE = ".aside-"
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
NO_FILES = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
LOCK_POLL_S = 0.01
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PROBE = 1 << 20  # bytes; databases write this much at once
LOCKED_S = 600.0
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
PRIVATE_UMASK = OTHERS = 0o077
LOG_MIB, USUAL_LOG_MIB = "MILLRACE_LOG_MIB", 16  # size of each log
LOG_RUNS, USUAL_LOG_RUNS = "MILLRACE_LOG_RUNS", 50  # number of runs that keep logs in MILLRACE_HOME
IN_USE_S = 86_400.0  # younger logs stay, since their run may be active


def write_whole(target: Path, blocks: Iterable[bytes]) -> None:
    """Write the blocks as one file. After a crash at any moment the file is the old one or the new one."""
    with written_aside(target, blocks) as put:
        put()


@contextlib.contextmanager
def written_aside(target: Path, blocks: Iterable[bytes]) -> Iterator[Callable[[], None]]:
    """Write a temporary file beside the target. Yields a function that renames it into place; without a call it is deleted."""
    make_folder(target.parent)
    aside = target.with_name(f"{ASIDE}{uuid.uuid4().hex}")

    def put() -> None:
        aside.replace(target)
        _sync_folder(target.parent)

    try:
        _write_synced(aside, blocks, "wb")
        yield put
    finally:
        aside.unlink(missing_ok=True)


def create_whole(target: Path, data: bytes) -> bool:
    """Write a new file; False if the path exists. Other processes see the whole file or none.

    On a file system without hard links they may see a part of it, and a crash may leave a part.
    """
    make_folder(target.parent)
    aside = target.with_name(f"{ASIDE}{uuid.uuid4().hex}")
    try:
        _write_synced(aside, [data], "wb")
        try:
            os.link(aside, target)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            _write_synced(target, [data], "xb")
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return True


def size_of(file: Path) -> int:
    """Bytes of a file; links are followed. Raises NoFileError for a pipe or a device: reading one may never end."""
    state = file.stat()
    kind = next((name for test, name in NO_FILES if test(state.st_mode)), None)
    if kind:
        raise NoFileError(errno.EINVAL, f"{kind} is in its place")
    return state.st_size


def opened(file: Path) -> BufferedReader:
    """Open a file for reading."""
    return open(file, "rb")


class NoFileError(OSError):
    """The path to read is not a file."""


def sha256(file: Path) -> tuple[str, int]:
    """The hash and size of a file of any size. Hashing releases the interpreter's lock, so files hash in parallel."""
    size_of(file)
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest(), handle.tell()


def _write_synced(file: Path, blocks: Iterable[bytes], mode: str) -> None:
    with open(file, mode, opener=_private) as handle:
        for block in blocks:
            handle.write(block)
        handle.flush()
        os.fsync(handle.fileno())


def move(source: Path, target: Path) -> None:
    """Move a file. After a crash at any moment it is at one of the two paths."""
    make_folder(target.parent)
    source.replace(target)
    _sync_folder(target.parent)
    _sync_folder(source.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents so that they survive a power cut. New folders are readable by this user only."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    for made in missing:
        _sync_folder(made.parent)


def keep_private() -> None:
    """Make files and folders that this process and its children create readable by this user only."""
    os.umask(PRIVATE_UMASK)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


def sweep(folder: Path, older_than_s: float, leave: Collection[str] = ()) -> list[Path]:
    """Remove temporary files of interrupted writes below a folder; returns their paths.

    Keeps files younger than `older_than_s`, which another process may still write. leave: folders to skip.
    """
    removed = []
    for aside in _asides(folder, leave):
        try:
            if time.time() - aside.stat().st_mtime >= older_than_s:
                aside.unlink()
                removed.append(aside)
        except FileNotFoundError:
            continue  # its writer finished
    return removed


def _asides(folder: Path, leave: Collection[str]) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if os.path.join(place, name) not in leave]
        yield from (Path(place, name) for name in files if name.startswith(ASIDE))


def home() -> Path:
    """MILLRACE_HOME, by default ~/.millrace: records, databases and secrets of the local servers. Readable by this user only."""
    path = Path(os.environ.get("MILLRACE_HOME", "~/.millrace")).expanduser()
    path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    state = path.stat()
    if state.st_uid == os.getuid() and state.st_mode & OTHERS and not state.st_mode & stat.S_ISVTX:
        path.chmod(PRIVATE_FOLDER)
    return path


def keep_fonts_at_home() -> None:
    """Have matplotlib keep its list of fonts in MILLRACE_HOME, unless the user set MPLCONFIGDIR. Call it before the import."""
    os.environ.setdefault("MPLCONFIGDIR", str(home().absolute() / "matplotlib"))


def secret_file(name: str, prefix: str = "") -> Path:
    """A file in MILLRACE_HOME with a random secret, readable by this user only. The first call creates it."""
    path = home() / name
    if not path.exists():
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                write_whole(path, [f"{prefix}{secrets.token_hex(32)}".encode()])
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process of this host can hold at a time. A process that dies releases it.

    Raises StalledError if another process, perhaps a stopped one, holds it longer than any server takes to start.
    """
    make_folder(path.parent)
    deadline = time.monotonic() + LOCKED_S
    with open(path, "w", opener=_private) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StalledError(
                        f"another process holds this lock for {LOCKED_S:g} s",
                        where=str(path),
                        remedy="a process of this user that was stopped does so: continue or end it, and start the same "
                        "command again",
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


@contextlib.contextmanager
def shared_or_alone(path: Path, *, alone: bool, patience_s: float) -> Iterator[bool]:
    """Hold a lock of many readers or one writer; yields False if it is not free within the time.

    On a file system without locks it yields True at once.
    """
    make_folder(path.parent)
    with contextlib.suppress(FileNotFoundError):
        size_of(path)
    kind, deadline = fcntl.LOCK_EX if alone else fcntl.LOCK_SH, time.monotonic() + patience_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(LOCK_POLL_S)
                    continue
                yield False
                return
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield True
            return


def is_full(folder: Path) -> bool:
    """Whether the folder's disk is full: a small file cannot be written there."""
    probe = folder / f"{ASIDE}{uuid.uuid4().hex}"
    try:
        _write_synced(probe, [bytes(PROBE)], "wb")
    except OSError as error:
        return error.errno in FULL
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return False


@contextlib.contextmanager
def room_at_home() -> Iterator[None]:
    """For code that writes to MILLRACE_HOME: turn its failure into StorageError if the disk of MILLRACE_HOME is full.

    Servers and libraries raise various errors on a full disk, and most do not mention the disk.
    """
    try:
        yield
    except Exception as error:
        if not is_full(home()):
            raise
        raise StorageError(
            "the disk is full",
            where=f"MILLRACE_HOME = {home()}",
            remedy="free space there, and start the same command again; nothing committed is lost",
        ) from error


def library_log() -> Path:
    """The file that gets a command's stderr, written by native libraries and child processes."""
    return home() / "stderr.log"


def log_folder(root: str, run: str) -> Path:
    """The folder for logs of a run's processes on this host.

    In the run's folder if this host has it. Otherwise, as for a run in an object store, in MILLRACE_HOME: logs grow line
    by line, and an object store cannot append.
    """
    path = root.removeprefix("file://")
    if "://" not in path and (folder := Path(path).expanduser().absolute() / run).is_dir():
        return folder / "logs"
    key = hashlib.sha256(root.encode()).hexdigest()[:8]
    return home() / "logs" / f"{run}-{key}"


def whole_number(name: str, usual: int) -> int:
    """An environment variable that holds a bound, 0 for no bound; `usual` if it is not set.

    Raises ConfigError naming the variable if it is not a whole number of at least 0.
    """
    text = os.environ.get(name, str(usual))
    if not text.isdecimal() or len(text) > 18:
        raise ConfigError(
            "not a whole number", where=f"{name}={text:.20}", remedy="give one, or 0 to keep all"
        )
    return int(text)


def bound_logs(*folders: Path) -> None:
    """Bound the logs in MILLRACE_HOME and in `folders`: the size of each log, and the number of runs that keep logs.

    A log that is too long loses its older half. Its writers are not disturbed, since they append.
    """
    most, runs = whole_number(LOG_MIB, USUAL_LOG_MIB) << 20, whole_number(LOG_RUNS, USUAL_LOG_RUNS)
    of_runs = sorted(
        (folder for folder in (home() / "logs").glob("*") if folder.is_dir()), key=_newest, reverse=True
    )
    for folder in of_runs[runs:] if runs else ():
        if time.time() - _newest(folder) > IN_USE_S:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in (home(), *of_runs, *folders):
        for log in folder.glob("*.log"):
            with contextlib.suppress(FileNotFoundError):
                if most and log.stat().st_size > most:
                    _drop_older_half(log, most // 2)


def _newest(folder: Path) -> float:
    return max((entry.stat().st_mtime for entry in (folder, *folder.glob("*"))), default=0.0)


def _drop_older_half(log: Path, keep: int) -> None:
    with log.open("r+b") as file:
        file.seek(-keep, os.SEEK_END)
        file.readline()
        newer = file.read()
        file.seek(0)
        file.write(newer)
        file.truncate()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
