"""JSON, tables and folders under one fsspec root, and the entries by which manifests name files.

Owns what is checked when a file is read: its kind, its hash, its rows. Knows nothing of runs or tasks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from millrace.connectors.host import local_files as local
from millrace.connectors.storage import tables
from millrace.connectors.storage.conditional import check_seal, sealed
from millrace.connectors.storage.files import (
    FileEntry,
    Files,
    Names,
    entry_of,
    file_blocks,
    in_threads,
    write_blocks,
)
from millrace.core.contracts.source_path import inside
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError
from millrace.core.plain_text import json_text

HASH_IN_NAME = re.compile(r"\.([0-9a-f]{16})\.parquet$")

LARGEST_JSON = 1 << 30  # bytes; a larger document is refused
LARGE = 64 << 20  # bytes; of a larger local table only the needed columns are read

Entries = list[FileEntry]


class Store(Files):
    """A folder on a local disk or an object store; paths are relative and use slashes."""

    def child(self, *parts: str) -> Store:
        """The store of a folder below this one."""
        child = Store(self.url_of("/".join(parts)))
        child.fence, child.walls = self.fence, self.walls
        return child

    # JSON and tables

    def read_json(self, path: str, entry: FileEntry | None = None) -> Any:
        """Parsed JSON. Raises CorruptFileError if the file is not JSON, or differs from its entry."""
        data = self.read_named(path, entry) if entry else self.read(path, LARGEST_JSON)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(f"not JSON: {error}", where=self.url_of(path)) from error

    def write_json(self, path: str, value: Any) -> FileEntry:
        """Write a value as JSON."""
        return self.write(path, json_text(value, indent=1).encode())

    def read_sealed(self, path: str) -> dict[str, Any]:
        """Read an object written by `write_sealed`. Raises CorruptFileError if it is not one, or changed."""
        return check_seal(self.read_json(path), self.url_of(path))

    def write_sealed(
        self, path: str, content: Mapping[str, Any], place: str | None = None, run: str | None = None
    ) -> FileEntry:
        """Write a JSON object with its hash. `place`: the end of its URL, by default the path. `run`: id of its run."""
        return self.write_json(path, sealed(content, place or path, run))

    def write_table(self, path: str, table: pa.Table, kind: str) -> FileEntry:
        """Write a table of a kind known to millrace.core.contracts.schema."""
        entry = self.write(path, tables.encode(table, kind))
        return entry.model_copy(update={"rows": table.num_rows, "table": kind})

    def write_pieces(self, path: str, pieces: Callable[[], Iterable[pa.Table]], kind: str) -> FileEntry:
        """Write a table piece by piece, each piece a row group. pieces: makes the pieces; called again after a failure."""
        rows = 0

        def counted() -> Iterator[pa.Table]:
            nonlocal rows
            rows = 0
            for piece in pieces():
                rows += piece.num_rows
                yield piece

        entry = write_blocks(self, path, lambda: tables.encode_pieces(counted(), kind))
        return entry.model_copy(update={"rows": rows, "table": kind})

    def read_table(
        self,
        path: str,
        kind: str | None = None,
        entry: FileEntry | None = None,
        columns: Names | None = None,
        sha256: str | None = None,
    ) -> pa.Table:
        """Read a table and check its kind and version; with an entry also its hash and rows. `sha256`: its hash, if known.

        Raises MissingFileError or CorruptFileError, naming file and remedy.
        """
        if entry:
            self._check_size(path, entry)
        with self.opened(path) as (data, found):
            actual = self._check_name(found)
            if entry:
                self._check(path, actual, entry)
            if sha256:
                self._check(path, actual, actual.model_copy(update={"sha256": sha256}))
            table = tables.decode(data, kind, self.url_of(path), columns)
        if entry and entry.rows is not None and table.num_rows != entry.rows:
            raise CorruptFileError(
                f"holds {table.num_rows} rows, what committed it says {entry.rows}", where=self.url_of(path)
            )
        return table

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[tuple[bytes | BinaryIO, FileEntry]]:
        """A file's content and entry. A large local file is opened instead of read, so that only the needed parts are read."""
        size = self.local_size(path)
        if size is None or size < LARGE:
            data = self.read(path)
            yield data, entry_of(path, data)
            return
        with self._retried("read", path, lambda: local.opened(Path(self._full(path)))) as handle:
            # before hashing, which may take long: a file that was never written to its end is all zeros there
            tables.check_ends(handle, self.url_of(path))
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
            size = handle.tell()
            handle.seek(0)
            yield handle, FileEntry.model_construct(path=path, sha256=digest, size=size)

    # entries

    def entry(self, path: str) -> FileEntry:
        """The entry of an existing file, with rows and kind if it is one of millrace's tables."""
        if not path.endswith(".parquet"):
            return self._hashed(path)
        with self.opened(path) as (data, found):
            actual = self._check_name(found)
            rows, kind = tables.describe(data, self.url_of(path))
        return actual.model_copy(update={"rows": rows, "table": kind})

    def entries(self, paths: Iterable[str]) -> Entries:
        """Entries of several files, in order."""
        return in_threads(self.entry, paths)

    def verify(self, entry: FileEntry) -> None:
        """Compare a file with its entry. Raises MissingFileError or CorruptFileError, naming file and difference."""
        self._check_size(entry.path, entry)
        self._check(entry.path, self.entry(entry.path), entry)

    def check(self, path: str, data: bytes, entry: FileEntry) -> None:
        """Compare the content that was read from a file with its entry. Raises CorruptFileError, naming file and difference."""
        self._check(path, entry_of(path, data), entry)

    def read_named(self, path: str, entry: FileEntry) -> bytes:
        """Read a whole file and compare it with its entry. Raises MissingFileError or CorruptFileError, naming file and difference."""
        self._check_size(path, entry)
        data = self.read(path)
        self._check(path, entry_of(path, data), entry)
        return data

    # folders

    def upload_dir(self, folder: str, path: str) -> Entries:
        """Copy a local folder to `path` ("" is the store itself), each file atomically; returns the files' entries."""
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return in_threads(
            lambda file: self._upload(file, f"{path}/{file.relative_to(folder).as_posix()}".lstrip("/")),
            files,
        )

    def download_dir(self, path: str, folder: str, only: Names | None = None) -> None:
        """Copy a folder of the store, or `only` these files of it, to a local folder. Raises MissingFileError if it is empty.

        Raises CorruptFileError, before anything is copied, if a name leads out of the local folder.
        """
        names = self.list(path) if only is None else [f"{path}/{name}" if path else name for name in only]
        if not names:
            raise MissingFileError(f"{self.url_of(path)}: no such folder, or it is empty; correct the path")
        here = Path(folder)
        targets = [self._target(name.removeprefix(f"{path}/"), path) for name in names]

        def fetch(copy: tuple[str, str]) -> None:
            local.write_whole(here / copy[1], self.blocks(copy[0]))

        in_threads(fetch, zip(names, targets, strict=True))

    def _target(self, name: str, path: str) -> str:
        """The path of a folder's file below the local folder. Raises CorruptFileError if it leads out of that folder."""
        try:
            return inside(name)
        except ValueError as error:
            raise CorruptFileError(
                f"{error}", where=self.url_of(path), remedy="restore the folder from a copy"
            ) from error

    def _upload(self, file: Path, path: str) -> FileEntry:
        if self.local:
            target = Path(self._full(path))
            self._retried("write", path, lambda: self._upload_here(file, target))
        else:
            self._retried("write", path, lambda: self._upload_object(file, path))
            self._wrote(path)
        sha256, size = local.sha256(file)
        return FileEntry(path=path, sha256=sha256, size=size)

    def _upload_here(self, file: Path, target: Path) -> None:
        with self._writing():
            local.write_whole(target, file_blocks(file))

    def _upload_object(self, file: Path, path: str) -> None:
        with self._writing():
            self.fs.put_file(str(file), self._full(path))

    def _check(self, path: str, actual: FileEntry, wanted: FileEntry) -> None:
        for what in ("size", "sha256", "rows", "table"):
            expected, got = getattr(wanted, what), getattr(actual, what)
            if expected is not None and got is not None and got != expected:
                raise CorruptFileError(
                    f"its {what} is {got}, what committed it says {expected}", where=self.url_of(path)
                )

    def _check_size(self, path: str, wanted: FileEntry) -> None:
        """Check a local file's size before reading it: a changed file may have any length."""
        size = self.local_size(path)
        if size is not None:
            self._check(path, FileEntry(path=path, sha256=wanted.sha256, size=size), wanted)

    def _check_name(self, entry: FileEntry) -> FileEntry:
        """Check an entry's hash against the digits of the hash in a part's name; other names have none."""
        match = HASH_IN_NAME.search(entry.path)
        if match and not entry.sha256.startswith(match[1]):
            raise CorruptFileError(
                "its content does not have the hash in its name", where=self.url_of(entry.path)
            )
        return entry


def split_url(url: str) -> tuple[Store, str]:
    """The store of a file's folder, and the file's name."""
    folder, slash, name = url.rpartition("/")
    if folder.endswith(":/"):
        raise StorageError(f"{url}: names no file; give a file below a bucket or folder")
    return Store(folder or (slash or ".")), name
