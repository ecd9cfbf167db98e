"""The rows of a source by their numbers, without reading them all: for sources that are too large to hold.

Owns where each row begins. JSONL files are read where they lie; other formats are first written to a temporary file that is
mapped into memory. Rows are parsed when they are asked for, so only then a row may prove unusable.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.connectors.storage.faults import retried
from millrace.connectors.storage.files import in_threads
from millrace.connectors.storage.own_folders import own_folder
from millrace.connectors.storage.sources.formats import MARK, Item, batches_of, parse_batch
from millrace.connectors.storage.sources.locate import DataFiles, Located, located
from millrace.core.contracts.rows.prompts import parse_line

NEWLINE = 10
Offsets = NDArray[np.int64]


class AddressedRows:
    """The rows that a source's path names: `len` of them, read in any order.

    size, sha256, files: bytes and hashes of the source's files, as a fingerprint has them.
    """

    def __init__(self, source: Located) -> None:
        """Reads each JSONL file once, others for their rows and again for their hash.

        Raises DataError naming the path if there is none that can be read.
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
        """The rows with these numbers, which count from 0 within the slice, in their order."""
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
    """A JSONL file: row n is the bytes from offsets[n] to offsets[n + 1], the newline included."""

    source: Located
    files: DataFiles
    name: str
    offsets: Offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, rows: Sequence[int], first: int) -> list[Item]:
        store = self.files.store
        path, url = f"{store.root}/{self.name}", store.url_of(self.name)
        starts = [int(self.offsets[row]) for row in rows]
        ends = [int(self.offsets[row + 1]) for row in rows]
        found: list[bytes] = retried(
            "read", url, lambda: store.fs.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
        )
        return [
            parse_line(_line(data, row), row + first, self.source)
            for row, data in zip(rows, found, strict=True)
        ]


def _line(data: bytes, row: int) -> bytes:
    return (data if row else data.removeprefix(MARK)).removesuffix(b"\n")


class _Batches:
    """A file of Arrow batches that is mapped into memory."""

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
    """A file whose rows can be read by number, and its size and hash."""
    name = files.names[number]
    if name.endswith((".jsonl", ".json")):
        size, sha256, offsets = _scanned(files, name)
        return _Lines(source, files, name, offsets), (size, sha256)
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


def _scanned(files: DataFiles, name: str) -> tuple[int, str, Offsets]:
    """Size and hash of a JSONL file, and where its lines begin; the last offset is its size."""
    hashed, size = hashlib.sha256(), 0
    found = [np.zeros(1, dtype=np.int64)]
    for block in files.store.blocks(name):
        hashed.update(block)
        found.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE) + size + 1)
        size += len(block)
    offsets = np.concatenate(found)
    if offsets[-1] != size:  # text after the last newline is a line too
        offsets = np.append(offsets, size)
    return size, hashed.hexdigest(), offsets
