"""Files under one fsspec root: written whole or not at all, with errors that name the file.

Owns how bytes get to and from a local disk, memory or an object store (whose puts are atomic). Knows nothing of what files
hold. May be used from many threads and pickled into another process.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from millrace.connectors.host import local_files as local
from millrace.connectors.storage import conditional
from millrace.connectors.storage.changes import CHANGES
from millrace.connectors.storage.faults import retried
from millrace.core.contracts.source_path import inside, leaves
from millrace.core.contracts.task_records import FileRecord
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError

BLOCK = 8 << 20
THREADS = 8
CONNECT_TIMEOUT_S = 2
READ_TIMEOUT_S = 60
Names = list[str]  # inside Files, `list` is a method

Item = TypeVar("Item")
Result = TypeVar("Result")


class FileEntry(BaseModel):
    """A committed file, as a manifest names it."""

    model_config = ConfigDict(extra="forbid")

    path: str
    sha256: str
    size: int
    rows: int | None = None
    table: str | None = None

    @field_validator("path")
    @classmethod
    def _is_inside(cls, path: str) -> str:
        """Refuse a path that leads out of the folder: readers of a record open nothing else."""
        return inside(path)

    def record(self) -> FileRecord:
        """The entry in the form of a task's record."""
        return FileRecord(
            path=self.path, sha256=self.sha256, size=self.size, rows=self.rows, table=self.table
        )


def recorded(files: Iterable[Any], where: str) -> list[FileEntry]:
    """The file entries of a record, a marker or an index. where: its URL.

    Raises CorruptFileError with this URL if an item is not an entry, or its path leads out of the folder.
    """
    try:
        return [FileEntry.model_validate(file) for file in files]
    except ValidationError as error:
        reason = error.errors()[0]
        at = ".".join(map(str, reason["loc"]))
        raise CorruptFileError(
            f"it names a file wrongly: {at}: {reason['msg']}",
            where=where,
            remedy="restore it from a copy",
        ) from error


class Fence(Protocol):
    """Keeps a driver from changing files after another process has taken its lease."""

    @property
    def token(self) -> int:
        """The driver's number, counted over all drivers of the run."""
        ...

    def check(self) -> None:
        """Raise LeaseHeldError if another process has taken the lease."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """A context in which files may be changed. Entering raises LeaseHeldError if another process has taken the lease."""
        ...


class Files:
    """A folder on a local disk or an object store; paths are relative and use slashes.

    With a `fence`, which children inherit, every change raises LeaseHeldError once another process has taken the lease.
    No path leads out of the folder. `walls`, which children inherit, is a folder on a local disk; with it no link leads out
    either: every path must lie in that folder after its links are resolved.
    """

    def __init__(self, root: str) -> None:
        self.fence: Fence | None = None
        self.attempt = 0  # the attempt of the shard that writes here
        self.walls: str | None = None
        head, separator, rest = root.partition("://")
        self.protocol = head if separator else "file"
        self.local = self.protocol in ("file", "local")
        rest = rest if separator else root
        self.root = os.path.abspath(os.path.expanduser(rest)) if self.local else rest.strip("/")
        if not rest:
            raise StorageError(
                f"storage root {root!r} names no folder; give a path or URL such as s3://bucket/runs"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def fs(self) -> Any:
        """The fsspec filesystem, one per process."""
        return _filesystem(self.protocol, os.getpid(), os.environ.get("AWS_ENDPOINT_URL"))

    @property
    def url(self) -> str:
        """The root as a URL, or as a path if it is local."""
        return self.root if self.local else f"{self.protocol}://{self.root}"

    @property
    def real_url(self) -> str:
        """The root as a URL, with links resolved, so that it is the same by every way."""
        return os.path.realpath(self.root) if self.local else self.url

    def url_of(self, path: str) -> str:
        """URL of a path below the root. Raises StorageError if the path leads out of it."""
        self._check_inside(path)
        return f"{self.url}/{path}" if path else self.url

    def write(self, path: str, data: bytes, *, unique: bool = False) -> FileEntry:
        """Write a whole file or nothing. Raises StorageError naming the file.

        unique: nothing else ever writes to this path. On S3 this skips the check for a concurrent change.
        """
        return self._write(path, data, unique=unique)

    def create(self, path: str, data: bytes) -> bool:
        """Write a new file; False if the path has a file with other content. Among concurrent calls one succeeds.

        If `creates_once` is False, several may succeed, and the last one's content stays.
        """

        def create() -> bool:
            with self._writing():
                created = (
                    local.create_whole(Path(self._full(path)), data)
                    if self.local
                    else self._create_object(path, data)
                )
                # an earlier attempt of this call may have written the file and then failed
                return created or bool(self.fs.cat_file(self._full(path)) == data)

        created = retried("write", self.url_of(path), create)
        self._wrote(path)
        return created

    @property
    def creates_once(self) -> bool:
        """Whether the store refuses to create a file twice. An object store is tested once per process."""
        return self.local or self._conditions()[0]

    def read(self, path: str, most: int | None = None) -> bytes:
        """The whole file. Raises MissingFileError or StorageError, also if it has more than `most` bytes."""

        def read() -> bytes:
            size = local.size_of(Path(self._full(path))) if self.local else None
            if size is not None and most is not None and size > most:
                raise CorruptFileError(
                    f"has {size} bytes, and at most {most} are read", where=self.url_of(path)
                )
            data: bytes = self.fs.cat_file(self._full(path))
            return data

        return self._retried("read", path, read)

    def local_size(self, path: str) -> int | None:
        """Bytes of a file on a local disk; None in an object store, which holds neither pipes nor devices.

        Raises as `read` does, and StorageError for a pipe or a device: reading one may never end.
        """
        if not self.local:
            return None
        return self._retried("read", path, lambda: local.size_of(Path(self._full(path))))

    def blocks(self, path: str, size: int = BLOCK) -> Iterator[bytes]:
        """The file, block by block, so that it need not fit in memory."""
        self.local_size(path)
        length = int(self._retried("read", path, lambda: self.fs.size(self._full(path))))
        for start in range(0, length, size):
            yield self._retried("read", path, partial(self._range, path, start, min(start + size, length)))

    def _hashed(self, path: str) -> FileEntry:
        """The entry of a file of any size, without rows and kind."""
        if self.local:
            sha256, size = self._retried("read", path, lambda: local.sha256(Path(self._full(path))))
            return FileEntry.model_construct(path=path, sha256=sha256, size=size)
        hashed, size = hashlib.sha256(), 0
        for block in self.blocks(path):
            hashed.update(block)
            size += len(block)
        return FileEntry.model_construct(path=path, sha256=hashed.hexdigest(), size=size)

    def exists(self, path: str) -> bool:
        """Whether the file or folder exists."""
        return bool(self._retried("look up", path, lambda: self.fs.exists(self._full(path))))

    def existing(self, paths: Iterable[str]) -> Names:
        """The paths that exist, each looked up by name."""
        asked = [*paths]
        found = zip(asked, in_threads(self.exists, asked), strict=True)
        return [path for path, is_there in found if is_there]

    def list(self, path: str = "") -> Names:
        """Paths of all files below a folder, sorted; none if it does not exist.

        On an object store, files that other processes just wrote may be missing. To decide by a file's existence, look it up
        by name.
        """
        try:
            names = self._retried("list", path, lambda: self.fs.find(self._full(path)))
        except MissingFileError:
            names = []
        if not self.local:
            names = self._as_changed(path, names)
        prefix = self.root.strip("/") + "/"
        relative = sorted(name.strip("/").removeprefix(prefix) for name in names)
        return [name for name in relative if not name.rsplit("/", 1)[-1].startswith(local.ASIDE)]

    def sizes(self, path: str = "") -> dict[str, int]:
        """Bytes of all files below a folder, by path; none if it does not exist. A listing, as `list` is."""
        try:
            found = self._retried("list", path, lambda: self.fs.find(self._full(path), detail=True))
        except MissingFileError:
            return {}
        prefix = self.root.strip("/") + "/"
        return {name.strip("/").removeprefix(prefix): int(info["size"]) for name, info in found.items()}

    def folders(self, path: str = "") -> Names:
        """Names of the folders directly below a folder, sorted."""
        try:
            items = self._retried("list", path, lambda: self.fs.ls(self._full(path), detail=True))
        except MissingFileError:
            items = []
        names = {item["name"].rstrip("/").rsplit("/", 1)[-1] for item in items if item["type"] == "directory"}
        if not self.local:
            above = f"{self._full(path)}/"
            inside = {name: name.removeprefix(above) for name in CHANGES.doubtful(self._full(path), [])}
            unlisted = {name: rest.split("/", 1)[0] for name, rest in inside.items() if "/" in rest}
            # only for folders that the listing lacks: a listed one needs no look-up of its files
            asked = [name for name, folder in unlisted.items() if folder not in names]
            names |= {unlisted[name] for name in self._still_there(asked)}
        return sorted(names)

    def remove(self, path: str, recursive: bool = False) -> None:
        """Remove a file, or with `recursive` a folder; does nothing if it does not exist."""
        with suppress(MissingFileError):
            self._retried("remove", path, lambda: self._remove(path, recursive))
        if not self.local:
            CHANGES.removed(self._full(path))

    def sweep(self, older_than_s: float, leave: Iterable[str] = ()) -> Names:
        """Remove temporary files of interrupted writes on a local disk; returns the paths. Object stores have none.

        leave: folders to skip.
        """
        if not self.local:
            return []
        root = Path(self.root)
        left = {str(root / folder) for folder in leave}
        return [
            file.relative_to(root).as_posix()
            for file in self._retried("remove", "", lambda: local.sweep(root, older_than_s, left))
        ]

    def check_writable(self, field: str = "storage.root") -> None:
        """Write and remove a small file. Raises StorageError naming the field that holds the root."""
        probe = f".millrace-probe-{uuid.uuid4().hex}"
        try:
            self._write(probe, b"probe", probe=True)
            self.remove(probe)
        except StorageError as error:
            reason = error.reason.replace(f"/{probe}", "")
            raise StorageError(reason, where=f"{field} = {self.url}", remedy=error.remedy) from error

    def _full(self, path: str) -> str:
        self._check_inside(path)
        return f"{self.root}/{path}" if path else self.root

    def _check_inside(self, path: str) -> None:
        if leaves(path):
            raise StorageError(
                f"the path {path!r} leads out of the folder", where=self.url, remedy="restore what names it"
            )
        if self.walls is None or not self.local:
            return
        walls, reached = os.path.realpath(self.walls), os.path.realpath(f"{self.root}/{path}")
        if reached != walls and not reached.startswith(f"{walls.rstrip('/')}/"):
            raise StorageError(
                f"{path or 'it'} leads to {reached} by a link, out of the run's folder",
                where=self.root,
                remedy="put the files themselves there; a run whose storage.root is on another disk needs no links",
            )

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> Sequence[bytes]:
        """The bytes of files from a start to an end, in order; an object store is asked for many at once.

        A file that ends before gives fewer bytes. Raises MissingFileError or StorageError, naming the first file.
        """
        if self.local:
            return [self._retried("read", path, partial(self._range, path, *span)) for path, *span in wanted]
        if not wanted:
            return []
        paths, starts, ends = zip(*wanted, strict=True)
        full = [self._full(path) for path in paths]
        read = partial(self.fs.cat_ranges, full, list(starts), list(ends), on_error="raise")
        found: Sequence[bytes] = self._retried("read", paths[0], read)
        return found

    def _range(self, path: str, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self._full(path), start=start, end=end)
        return data

    def _write(self, path: str, data: bytes, *, unique: bool = False, probe: bool = False) -> FileEntry:
        retried("write", self.url_of(path), lambda: self._put(path, data, unique or probe), probe)
        self._wrote(path)
        return entry_of(path, data)

    def _wrote(self, path: str) -> None:
        if not self.local:
            CHANGES.wrote(self._full(path))

    def _as_changed(self, path: str, names: Names) -> Names:
        """The listing of an object store, with what this process wrote and without what it removed."""
        below = f"{self._full(path)}/"
        # s3fs lists an empty folder as itself, and names in memory start with a slash
        names = [name.lstrip("/") for name in names if name.lstrip("/").startswith(below)]
        doubtful = CHANGES.doubtful(self._full(path), names)
        return [*(name for name in names if name not in doubtful), *self._still_there(doubtful)]

    def _still_there(self, names: Iterable[str]) -> Names:
        """The names that are objects of the store, each looked up by name."""
        asked = sorted(names)

        def there(name: str) -> bool:
            return bool(retried("look up", f"{self.protocol}://{name}", lambda: self.fs.isfile(name)))

        found = zip(asked, in_threads(there, asked), strict=True)
        return [name for name, is_there in found if is_there]

    def _put(self, path: str, data: bytes, unique: bool) -> None:
        full = self._full(path)
        if self.fence and not unique and not self.local and self._conditions()[1]:
            self._replace(path, data)
            return
        with self._writing():
            if self.local:
                local.write_whole(Path(full), [data])
            else:
                self.fs.pipe_file(full, data)

    def _replace(self, path: str, data: bytes) -> None:
        """Write an object, provided that it has not changed since before the fence was checked; if it has, check again."""
        assert self.fence is not None
        full, done = self._full(path), False
        while not done:
            etag = conditional.etag(self.fs, full)
            self.fence.check()
            done = (
                conditional.create(self.fs, self.protocol, full, data)
                if etag is None
                else conditional.replace(self.fs, full, data, etag)
            )

    def _create_object(self, path: str, data: bytes) -> bool:
        full = self._full(path)
        if self._conditions()[0]:
            return conditional.create(self.fs, self.protocol, full, data)
        if self.fs.exists(full):
            return False
        self.fs.pipe_file(full, data)
        return True

    def _remove(self, path: str, recursive: bool) -> None:
        full = self._full(path)
        with self._writing():
            # removing a folder goes by its listing, which may lack files just written
            unlisted = CHANGES.doubtful(full, []) if recursive and not self.local else set()
            self.fs.rm(full, recursive=recursive)
            for name in self._still_there(unlisted):
                self.fs.rm_file(name)

    def _writing(self) -> AbstractContextManager[None]:
        return self.fence.writing() if self.fence else nullcontext()

    def _conditions(self) -> tuple[bool, bool]:
        """Whether the store refuses to create an object twice, and to replace a changed one."""
        if self.protocol == "memory":
            return True, False
        bucket = self.root.split("/")[0]
        return _conditions(self.protocol, os.environ.get("AWS_ENDPOINT_URL"), bucket, self.root)

    def _retried(self, verb: str, path: str, call: Callable[[], Result]) -> Result:
        return retried(verb, self.url_of(path), call)


def write_blocks(files: Files, path: str, blocks: Callable[[], Iterable[bytes]]) -> FileEntry:
    """Write a whole file or nothing, block by block. On a local disk it need not fit in memory.

    blocks: makes the blocks; called again after a failure. The fence is checked once they are written.
    """
    if not files.local:
        return files.write(path, b"".join(blocks()))

    def put() -> FileEntry:
        hashed = HashedBlocks(blocks())
        with local.written_aside(Path(files._full(path)), hashed) as replace, files._writing():
            replace()
        return FileEntry(path=path, sha256=hashed.sha256.hexdigest(), size=hashed.size)

    return retried("write", files.url_of(path), put)


def move_file(files: Files, path: str, target: str) -> None:
    """Give a file another path. Raises MissingFileError if it does not exist."""

    def move() -> None:
        with files._writing():
            if files.local:
                local.move(Path(files._full(path)), Path(files._full(target)))
            else:
                files.fs.copy(files._full(path), files._full(target))
                files.fs.rm(files._full(path))

    retried("move", files.url_of(path), move)
    if not files.local:
        CHANGES.wrote(files._full(target))
        CHANGES.removed(files._full(path))


def in_threads(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call it for each item in parallel, since calls wait for storage; returns the results in the items' order."""
    listed = list(items)
    if len(listed) < 2:
        return [call(item) for item in listed]
    with ThreadPoolExecutor(min(THREADS, len(listed))) as pool:
        return list(pool.map(call, listed))


class HashedBlocks:
    """Iterates over a file's blocks, and hashes and counts them on the way."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self.sha256, self.size = hashlib.sha256(), 0
        self._blocks = blocks

    def __iter__(self) -> Iterator[bytes]:
        for block in self._blocks:
            self.sha256.update(block)
            self.size += len(block)
            yield block


def entry_of(path: str, data: bytes) -> FileEntry:
    return FileEntry.model_construct(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def file_blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as handle:
        while block := handle.read(BLOCK):
            yield block


_tried: dict[tuple[str, str | None, str], tuple[bool, bool]] = {}


def _conditions(protocol: str, endpoint: str | None, bucket: str, folder: str) -> tuple[bool, bool]:
    """The result of `conditional.tried` for a bucket, cached in this process."""
    key = (protocol, endpoint, bucket)
    if key not in _tried:
        filesystem = _filesystem(protocol, os.getpid(), endpoint)
        _tried[key] = retried(
            "write", f"{protocol}://{folder}", lambda: conditional.tried(filesystem, protocol, folder)
        )
    return _tried[key]


@lru_cache(maxsize=16)
def _filesystem(protocol: str, process: int, endpoint: str | None) -> Any:
    """One filesystem per process: a forked child must not use its parent's connections.

    Listings are not cached, since other processes write too. The libraries' retries are off, since `faults` retries.
    """
    if protocol in ("file", "local", "memory"):
        return fsspec.filesystem(protocol)
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
        }
    filesystem = fsspec.filesystem(protocol, **options)
    if protocol in ("s3", "s3a"):
        filesystem.retries = 1
    return filesystem
