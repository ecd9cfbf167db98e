"""Files under one fsspec root: atomic writes, hashes, named errors.

Owns how a file is written whole or not at all, locally (aside, fsync, rename) and on object stores (one put). Knows
nothing of runs or tasks. Transient failures are retried; a full disk is not.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from pydantic import BaseModel
from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential_jitter,
)

from connectors.storage import tables
from core.errors import CorruptFileError, MissingFileError, StorageError

log = logging.getLogger(__name__)
ATTEMPTS = 6
FINAL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
)


class FileEntry(BaseModel):
    """A committed file: what a manifest says of it."""

    path: str
    sha256: str
    size: int
    rows: int | None = None
    table: str | None = None


class Store:
    """A folder on a local disk or an object store; paths are relative and use slashes."""

    def __init__(self, root: str) -> None:
        self.protocol, _, rest = root.rpartition("://")
        self.local = self.protocol in ("", "file")
        self.root = str(Path(rest).expanduser().absolute()) if self.local else rest.rstrip("/")
        self._fs: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fs": None}

    @property
    def fs(self) -> Any:
        """The fsspec filesystem, made when first used; no listing is cached, since other processes write too."""
        if self._fs is None:
            options = {} if self.local or self.protocol == "memory" else {"use_listings_cache": False}
            self._fs = fsspec.filesystem(self.protocol or "file", **options)
        return self._fs

    @property
    def url(self) -> str:
        """The root as a URL, or as a path where it is local."""
        return self.root if self.local else f"{self.protocol}://{self.root}"

    def url_of(self, path: str) -> str:
        """URL of a path under the root."""
        return f"{self.url}/{path}" if path else self.url

    def child(self, *parts: str) -> Store:
        """The store of a folder below this one."""
        return Store(self.url_of("/".join(parts)))

    def write(self, path: str, data: bytes) -> FileEntry:
        """Write a whole file or nothing. Raises StorageError naming the file."""
        self._retried(
            "write", path, lambda: self._write_local(path, data) if self.local else self._put(path, data)
        )
        return FileEntry(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data))

    def read(self, path: str) -> bytes:
        """The whole file. Raises MissingFileError or StorageError."""
        data: bytes = self._retried("read", path, lambda: self.fs.cat_file(self._full(path)))
        return data

    def exists(self, path: str) -> bool:
        """Whether the file or folder is there."""
        return bool(self._retried("look up", path, lambda: self.fs.exists(self._full(path))))

    def list(self, path: str = "") -> list[str]:
        """Paths of all files below a folder, sorted; none if it is not there."""
        full = self._full(path) if path else self.root
        try:
            found = self._retried("list", path, lambda: self.fs.find(full))
        except MissingFileError:
            return []
        prefix = self.root.strip("/") + "/"
        relative = sorted(name.strip("/").removeprefix(prefix) for name in found)
        return [name for name in relative if not name.rsplit("/", 1)[-1].startswith(".aside-")]

    def folders(self) -> list[str]:
        """Names of the folders right below the root."""
        try:
            found = self._retried("list", "", lambda: self.fs.ls(self.root, detail=True))
        except MissingFileError:
            return []
        return sorted(
            item["name"].rstrip("/").rsplit("/", 1)[-1] for item in found if item["type"] == "directory"
        )

    def remove(self, path: str, recursive: bool = False) -> None:
        """Remove a file, or with `recursive` a folder; nothing happens if it is not there."""
        try:
            self._retried("remove", path, lambda: self.fs.rm(self._full(path), recursive=recursive))
        except MissingFileError:
            return

    def read_json(self, path: str) -> Any:
        """Parsed JSON. Raises CorruptFileError if it is none."""
        try:
            return json.loads(self.read(path))
        except ValueError as error:
            raise CorruptFileError(
                f"{self.url_of(path)}: not JSON: {error}; restore the file or remove it"
            ) from error

    def write_json(self, path: str, value: Any) -> FileEntry:
        """Write a value as JSON."""
        return self.write(path, json.dumps(value, indent=1, ensure_ascii=False).encode())

    def write_table(self, path: str, table: pa.Table, kind: str) -> FileEntry:
        """Write a table of a kind known to core.schema."""
        entry = self.write(path, tables.encode(table, kind))
        return entry.model_copy(update={"rows": table.num_rows, "table": kind})

    def read_table(
        self, path: str, kind: str, entry: FileEntry | None = None, columns: list[str] | None = None
    ) -> pa.Table:
        """Read a table and check its kind, version and, given its entry, hash. Raises CorruptFileError."""
        data = self.read(path)
        if entry and hashlib.sha256(data).hexdigest() != entry.sha256:
            raise CorruptFileError(
                f"{self.url_of(path)}: its hash is not the one in the manifest; restore the file"
            )
        return tables.decode(data, kind, self.url_of(path), columns)

    def entry(self, path: str) -> FileEntry:
        """What a manifest says of a file that is there; rows and kind for tables."""
        data = self.read(path)
        rows, kind = tables.describe(data) if path.endswith(".parquet") else (None, None)
        return FileEntry(
            path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data), rows=rows, table=kind
        )

    def upload_dir(self, local: str, path: str) -> None:
        """Copy a local folder here, file by file."""
        for file in sorted(Path(local).rglob("*")):
            if file.is_file():
                self.write(f"{path}/{file.relative_to(local).as_posix()}", file.read_bytes())

    def download_dir(self, path: str, local: str) -> None:
        """Copy a folder from here to a local folder. Raises MissingFileError if it is empty."""
        names = self.list(path)
        if not names:
            raise MissingFileError(f"{self.url_of(path)}: no such folder, or it is empty")
        for name in names:
            target = Path(local) / name.removeprefix(f"{path}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.read(name))

    def check_writable(self) -> None:
        """Write and remove a small file. Raises StorageError naming storage.root."""
        probe = f".millrace-probe-{uuid.uuid4().hex}"
        try:
            self.write(probe, b"probe")
            self.remove(probe)
        except StorageError as error:
            raise StorageError(f"storage.root = {self.url}: cannot be written: {error}") from error

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _put(self, path: str, data: bytes) -> None:
        self.fs.pipe_file(self._full(path), data)

    def _write_local(self, path: str, data: bytes) -> None:
        target = Path(self._full(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".aside-{uuid.uuid4().hex}")
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _retried(self, verb: str, path: str, call: Any) -> Any:
        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential_jitter(initial=0.1, max=5),
            retry=retry_if_exception(_transient),
            before_sleep=before_sleep_log(log, logging.WARNING),
            reraise=True,
        )
        try:
            return retrying(call)
        except FileNotFoundError as error:
            raise MissingFileError(f"{self.url_of(path)}: no such file") from error
        except Exception as error:
            if not _storage_fault(error):
                raise
            remedy = (
                "free space and start again"
                if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
                else "mend it and start again; nothing committed is lost"
            )
            raise StorageError(f"{self.url_of(path)}: cannot {verb}: {error}; {remedy}") from error


def _storage_fault(error: BaseException) -> bool:
    """Whether an exception comes from the storage rather than from a defect of ours."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in (
        "botocore",
        "aiobotocore",
        "aiohttp",
        "gcsfs",
        "s3fs",
    )


def _transient(error: BaseException) -> bool:
    """Whether trying again may help."""
    return (
        _storage_fault(error)
        and getattr(error, "errno", None) not in FINAL
        and not isinstance(error, PermissionError | FileNotFoundError)
    )
