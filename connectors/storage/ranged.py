"""Stored tables read by byte ranges: footers first, then only the columns and row groups that a question needs.

Owns which bytes are asked for, and what can be checked without the whole file: its size, kind, columns, rows and the checksum of
each page that is read. The file's hash is not: `RunFolder.verify` compares it. Knows nothing of what the tables mean.
"""

from __future__ import annotations

import bisect
import io
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.store import Store
from millrace.connectors.storage.tables import MAGIC
from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError

TAIL = 32 << 10  # bytes that are read for a footer at first
GAP = 64 << 10  # bytes between two ranges below which they are read as one
AT_ONCE = 64 << 20  # bytes in memory at once while several files are read
FOOTERS = 4096  # that are kept
Keep = Callable[[FileEntry, int, pq.RowGroupMetaData], bool]
"""Whether a row group is read: its file, its number there, and what the footer says of it."""
Failed = Callable[[StorageError], None]


class RangedTables:
    """Tables of one store. Footers are kept in memory by the hash of their file, since a committed file never changes."""

    def __init__(self, store: Store, footers: OrderedDict[str, pq.FileMetaData] | None = None) -> None:
        """footers: shared with the tables of other folders."""
        self._store = store
        self._footers = OrderedDict() if footers is None else footers

    def read(
        self,
        entries: Sequence[FileEntry],
        kind: str,
        columns: Sequence[str],
        keep: Keep | None = None,
        failed: Failed | None = None,
    ) -> pa.Table:
        """These columns of tables of a kind, in the order of the entries.

        keep: whether a row group is read, by its statistics; all of them by default. failed: called with the error of a file
        that is missing or broken, and the rest is read; without it MissingFileError or CorruptFileError is raised.
        """
        found = [table for _, _, table in self.groups(entries, kind, columns, keep, failed)]
        empty = pa.Table.from_batches([], schema.schema(kind)).select([*columns])
        return pa.concat_tables([empty, *found])

    def groups(
        self,
        entries: Sequence[FileEntry],
        kind: str,
        columns: Sequence[str],
        keep: Keep | None = None,
        failed: Failed | None = None,
    ) -> Iterator[tuple[FileEntry, int, pa.Table]]:
        """The same by row group: its file, its number there, its rows."""
        batch: list[_Wanted] = []
        size = 0
        for entry, footer in self.footers(entries, kind, failed):
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                if keep is None or keep(entry, number, group):
                    wanted = _Wanted(entry, number, footer, _ranges(group, columns))
                    batch.append(wanted)
                    size += wanted.size
                if size >= AT_ONCE:
                    yield from self._decoded(batch, columns, failed)
                    batch, size = [], 0
        yield from self._decoded(batch, columns, failed)

    def footers(
        self, entries: Sequence[FileEntry], kind: str, failed: Failed | None = None
    ) -> list[tuple[FileEntry, pq.FileMetaData]]:
        """The entries whose file is whole as far as its footer says, each with the footer."""
        new = [entry for entry in entries if entry.sha256 not in self._footers]
        self._read_footers(new, failed)
        found = []
        for entry in entries:
            footer = self._footers.get(entry.sha256)
            if footer is None:
                continue
            self._footers.move_to_end(entry.sha256)
            try:
                self._check(entry, footer, kind)
            except CorruptFileError as error:
                _handed(error, failed)
                continue
            found.append((entry, footer))
        while len(self._footers) > max(FOOTERS, len(found)):
            self._footers.popitem(last=False)
        return found

    def _read_footers(self, entries: Sequence[FileEntry], failed: Failed | None) -> None:
        ends = [(entry, max(0, entry.size - TAIL), entry.size + 1) for entry in entries]
        again: list[tuple[FileEntry, int, int]] = []
        tails: list[tuple[FileEntry, bytes]] = []
        for (entry, *_), tail in zip(ends, self._each(ends, failed), strict=True):
            if tail is None:
                continue
            try:
                size = self._footer_size(entry, tail)
            except CorruptFileError as error:
                _handed(error, failed)
                continue
            if size > len(tail):
                again.append((entry, entry.size - size, entry.size))
            else:
                tails.append((entry, tail))
        for (entry, *_), data in zip(again, self._each(again, failed), strict=True):
            tails += [(entry, data)] if data is not None else []
        for entry, tail in tails:
            try:
                self._footers[entry.sha256] = pq.ParquetFile(pa.BufferReader(tail)).metadata
            except (pa.ArrowException, OSError) as error:
                _handed(self._broken(entry, f"not a whole Parquet file: {error}"), failed)

    def _footer_size(self, entry: FileEntry, tail: bytes) -> int:
        """Bytes of the footer with its length and magic. Raises CorruptFileError if the file does not end as its entry says."""
        if len(tail) != min(entry.size, TAIL):
            what = "longer" if len(tail) > min(entry.size, TAIL) else "shorter"
            raise self._broken(entry, f"is {what} than the {entry.size} bytes that what committed it says")
        if tail[-len(MAGIC) :] != MAGIC:
            raise self._broken(entry, "not a whole Parquet file: it does not end as one")
        size = int.from_bytes(tail[-8:-4], "little") + 8
        if size > entry.size:
            raise self._broken(entry, "not a whole Parquet file: its footer is longer than the file")
        return size

    def _check(self, entry: FileEntry, footer: pq.FileMetaData, kind: str) -> None:
        wanted = schema.schema(kind)
        try:
            stored = footer.schema.to_arrow_schema()
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise self._broken(entry, f"has no readable schema: {error}") from error
        if not stored.equals(wanted):
            raise self._broken(entry, f"does not hold the columns of {kind}")
        if entry.rows is not None and footer.num_rows != entry.rows:
            raise self._broken(entry, f"holds {footer.num_rows} rows, what committed it says {entry.rows}")

    def _decoded(
        self, batch: Sequence[_Wanted], columns: Sequence[str], failed: Failed | None
    ) -> Iterator[tuple[FileEntry, int, pa.Table]]:
        asked = [(each.entry, start, end) for each in batch for start, end in each.ranges]
        blocks = iter(self._each(asked, failed))
        for each in batch:
            spans = [(start, next(blocks)) for start, _ in each.ranges]
            if any(data is None for _, data in spans):
                continue  # its error was handed on
            try:
                source = pa.PythonFile(_Spans(spans, each.entry.size), mode="r")
                file = pq.ParquetFile(source, metadata=each.footer, page_checksum_verification=True)
                rows = file.read_row_group(each.number, columns=[*columns], use_threads=False)
                yield each.entry, each.number, rows.select([*columns])
            except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
                _handed(self._broken(each.entry, f"not a whole Parquet file: {error}"), failed)

    def _each(
        self, wanted: Sequence[tuple[FileEntry, int, int]], failed: Failed | None
    ) -> Sequence[bytes | None]:
        """Ranges of files, all at once; if one of the files is missing, one by one, with None for it."""
        try:
            return self._store.ranges([(entry.path, start, end) for entry, start, end in wanted])
        except StorageError as error:
            if failed is None:
                raise
            if len(wanted) == 1:
                failed(error)
                return [None]
        return [data for span in wanted for data in self._each([span], failed)]

    def _broken(self, entry: FileEntry, reason: str) -> CorruptFileError:
        return CorruptFileError(reason, where=self._store.url_of(entry.path), remedy="restore it from a copy")


class _Wanted:
    """A row group that is to be read."""

    def __init__(
        self, entry: FileEntry, number: int, footer: pq.FileMetaData, ranges: list[tuple[int, int]]
    ) -> None:
        self.entry, self.number, self.footer, self.ranges = entry, number, footer, ranges

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.ranges)


class _Spans(io.RawIOBase):
    """A file of which some spans are in memory. A read outside of them raises OSError."""

    def __init__(self, spans: Sequence[tuple[int, Any]], size: int) -> None:
        self._starts = [start for start, _ in spans]
        self._spans, self._size, self._at = spans, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        number = bisect.bisect_right(self._starts, self._at) - 1
        start, data = self._spans[number] if number >= 0 else (0, b"")
        offset = self._at - start
        if size < 0 or offset + size > len(data):
            raise OSError(f"bytes {self._at} to {self._at + size} are not where its footer says")
        self._at += size
        return data[offset : offset + size]


def among(column: str, values: Collection[Any]) -> Keep:
    """Whether a row group may hold one of these values, by the least and the largest of its column."""

    def keep(_: FileEntry, __: int, group: pq.RowGroupMetaData) -> bool:
        for place in range(group.num_columns):
            chunk = group.column(place)
            if chunk.path_in_schema == column:
                if not chunk.is_stats_set or not chunk.statistics.has_min_max:
                    return True
                return any(chunk.statistics.min <= value <= chunk.statistics.max for value in values)
        return True

    return keep


def _ranges(group: pq.RowGroupMetaData, columns: Sequence[str]) -> list[tuple[int, int]]:
    """Where the bytes of these columns lie, in order; neighbours as one range."""
    wanted = set(columns)
    found: list[tuple[int, int]] = []
    for number in range(group.num_columns):
        chunk = group.column(number)
        if chunk.path_in_schema.split(".")[0] not in wanted:
            continue
        first = chunk.dictionary_page_offset or chunk.data_page_offset
        found.append((first, first + chunk.total_compressed_size))
    joined: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if joined and start - joined[-1][1] <= GAP:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _handed(error: CorruptFileError | MissingFileError, failed: Failed | None) -> None:
    if failed is None:
        raise error
    failed(error)
