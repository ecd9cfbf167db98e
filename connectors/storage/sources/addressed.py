"""Reads rows of a source by number, for sources that are too large for memory.

Owns the offset of each row. JSONL files are read in place; other formats are first written to a temporary file that is mapped
into memory. Rows are parsed on demand, so an unusable row shows only then. Each row of a JSONL file is compared with its
checksum from the first scan, since the file may be replaced meanwhile.
"""

import hashlib
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.connectors.host.own_folders import own_folder
from millrace.connectors.storage.faults import retried
from millrace.connectors.storage.files import in_threads
from millrace.connectors.storage.sources.formats import MARK, Item, batches_of, line_of, parse_batch
from millrace.connectors.storage.sources.locate import DataFiles, Located, located, where
from millrace.core.errors import DataError

NEWLINE = 10
Offsets = NDArray[np.int64]
Checksums = NDArray[np.uint32]


class AddressedRows:
    """The rows of a source: `len` of them, read in any order.

    size, sha256, files: bytes and hashes of the source's files, as in its fingerprint.
    """

    def __init__(self, source: Located) -> None:
        """Reads each JSONL file once, and files of other formats twice: for their rows and for their hash.

        Raises DataError naming the path if the source cannot be read.
        """
        self._source = source
        self._files = located(source)
        opened = in_threads(partial(_opened, source, self._files), range(len(self._files.names)))
        self._opened = [file for file, _ in opened]
        self._starts = np.cumsum([0, *(len(file) for file in self._opened)])
        self._numbers = self._files.path.rows_of(int(self._starts[-1]))
        self.size, self.sha256, self.files = self._files.together([hashed for _, hashed in opened])

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, numbers: Sequence[int]) -> list[Item]:
        """The rows with these numbers, in this order. Numbers count from 0 within the slice."""
        rows = np.asarray([self._numbers[number] for number in numbers], dtype=np.int64)
        which = np.searchsorted(self._starts, rows, side="right") - 1
        found: dict[int, Item] = {}
        for file in sorted(set(which.tolist())):
            here = sorted(set(rows[which == file].tolist()))
            first = int(self._starts[file])
            for row, item in zip(
                here, self._opened[file].read([row - first for row in here], first), strict=True
            ):
                found[row] = item
        return [found[row] for row in rows.tolist()]


@dataclass
class _Lines:
    """A JSONL file: row n is the bytes from offsets[n] to offsets[n + 1], the newline included.

    checksums: CRC-32 of each row without its newline.
    """

    source: Located
    files: DataFiles
    name: str
    offsets: Offsets
    checksums: Checksums

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, rows: Sequence[int], first: int) -> list[Item]:
        """These rows of the file, whose row 0 is the source's row `first`. Raises DataError if a row changed since the scan."""
        store = self.files.store
        path, url = f"{store.root}/{self.name}", store.url_of(self.name)
        starts = [int(self.offsets[row]) for row in rows]
        ends = [int(self.offsets[row + 1]) for row in rows]
        found: list[bytes] = retried(
            "read", url, lambda: store.fs.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
        )
        return [
            line_of(self._checked(data.removesuffix(b"\n"), row), row + first, self.source)
            for row, data in zip(rows, found, strict=True)
        ]

    def _checked(self, line: bytes, row: int) -> bytes:
        """The line of a row, without a byte order mark."""
        if zlib.crc32(line) != self.checksums[row]:
            raise DataError(
                f"row {row} of {self.files.store.url_of(self.name)} has changed since the run started",
                where=where(self.source),
                remedy="restore the file and start the same command again; or start it with data.allow_changes=true to continue "
                "with the file's new content",
            )
        return line if row else line.removeprefix(MARK)


class _Batches:
    """A file of Arrow batches, mapped into memory."""

    def __init__(self, source: Located, path: Path) -> None:
        self._source = source
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        counts = [
            self._reader.get_batch(number).num_rows for number in range(self._reader.num_record_batches)
        ]
        self._starts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, rows: Sequence[int], first: int) -> list[Item]:
        found: list[Item] = []
        for row in rows:
            number = int(np.searchsorted(self._starts, row, side="right")) - 1
            batch = self._reader.get_batch(number).slice(row - int(self._starts[number]), 1)
            found.extend(parse_batch(self._source, batch, row + first))
        return found


def _opened(source: Located, files: DataFiles, number: int) -> tuple[_Lines | _Batches, tuple[int, str]]:
    """Prepare a file for reading rows by number; returns it with its size and hash."""
    name = files.names[number]
    if name.endswith((".jsonl", ".json")):
        size, sha256, offsets, checksums = _scanned(files, name)
        return _Lines(source, files, name, offsets, checksums), (size, sha256)
    folder = own_folder("millrace-rows", tempfile.gettempdir())
    path = Path(folder) / "rows.arrow"
    writer: pa.ipc.RecordBatchFileWriter | None = None
    for batch in batches_of(source, files, name):
        writer = writer or pa.ipc.new_file(str(path), batch.schema)
        writer.write_batch(batch)
    if writer is None:
        writer = pa.ipc.new_file(str(path), pa.schema([]))
    writer.close()
    return _Batches(source, path), files.hashed(name)


def _scanned(files: DataFiles, name: str) -> tuple[int, str, Offsets, Checksums]:
    """Size and hash of a JSONL file, the offset of each line (then the file's size), and the checksum of each line."""
    hashed, size = hashlib.sha256(), 0
    offsets, checksums = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=np.uint32)]
    begun = 0  # checksum so far of the line that continues in the next block
    for block in files.store.blocks(name):
        hashed.update(block)
        offsets.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE) + size + 1)
        size += len(block)
        lines = block.split(b"\n")
        last = lines.pop()
        if lines:
            ended = map(zlib.crc32, lines, chain([begun], repeat(0)))
            checksums.append(np.fromiter(ended, dtype=np.uint32, count=len(lines)))
            begun = 0
        begun = zlib.crc32(last, begun)
    starts = np.concatenate(offsets)
    if starts[-1] != size:  # text after the last newline is a line too
        starts, checksums = np.append(starts, size), [*checksums, np.array([begun], dtype=np.uint32)]
    return size, hashed.hexdigest(), starts, np.concatenate(checksums)
