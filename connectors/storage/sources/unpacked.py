"""Bounds the memory of a Parquet or Arrow file's unpacked rows.

A file of kilobytes may unpack to gigabytes: a dictionary holds a long text once for all rows that repeat it, and a page of one
letter packs to nothing. Owns the bounds, which depend on the file's size, and the way to read a Parquet file within them:
columns of text stay references into their dictionary, and a few rows at a time are unpacked.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

BATCH_ROWS = 1024
BATCH = 16 << 20  # bytes of rows that are unpacked at once
LARGEST_BATCH = 64 << 20  # bytes of a batch before it is checked
LARGEST_ROW = 128 << 20  # bytes
ALWAYS = 256 << 20  # bytes that every file may unpack to
PACKED = 200  # beyond these bytes, a file may unpack to this many times its size; text packs to about a tenth
HEADER = 64  # bytes; they contain the first fields of a page's header
NEXT_FIELD_I32 = b"\x15"
DICTIONARY_PAGE = 2
ROW = 1024  # bytes that Python needs for a row beside its values

Sizes = NDArray[np.int64]


class TooLargeError(ValueError):
    """A file or a row unpacks to more than the bounds allow."""


class Unpacking:
    """Counts the unpacked bytes of one file. size: bytes of the file."""

    def __init__(self, size: int) -> None:
        self._allowed = max(ALWAYS, PACKED * size)
        self._size = size
        self._sum = self._rows = 0

    def batches(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of a batch, unpacked a few at a time. Raises TooLargeError if a row or the file unpacks to too much."""
        sizes = reduce(np.add, map(sizes_of, batch.columns), np.full(batch.num_rows, ROW, dtype=np.int64))
        if len(sizes) and sizes.max() > LARGEST_ROW:
            row = int(np.argmax(sizes > LARGEST_ROW))
            raise TooLargeError(f"row {self._rows + row} is {sizes[row]} bytes, more than {LARGEST_ROW}")
        at = 0
        while at < len(sizes):
            sums = np.cumsum(sizes[at : at + BATCH_ROWS])
            count = max(1, int(np.searchsorted(sums, BATCH, side="right")))
            self._sum += int(sums[count - 1])
            self._rows += count
            if self._sum > self._allowed:
                raise TooLargeError(
                    f"its first {self._rows} rows are {self._sum} bytes, and the file is {self._size}: more than {PACKED} "
                    f"times as much, and than {ALWAYS}"
                )
            yield unpacked(batch.slice(at, count))
            at += count


def parquet_batches(data: Any, buffered: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The needed columns, in batches of so few rows that each stays small even if its texts repeat.

    Texts in lists stay references into their dictionary. Raises TooLargeError if a column of a row group would unpack to too much
    for a first batch.
    """
    file = pq.ParquetFile(data, buffer_size=buffered)
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        rows, lists = BATCH_ROWS, []
        for chunk in map(group.column, range(group.num_columns)):
            path, size = chunk.path_in_schema, chunk.total_uncompressed_size
            if path.partition(".")[0] not in columns and path not in columns:
                continue
            packed = max(1, chunk.total_compressed_size)
            if size > LARGEST_ROW and size > PACKED * packed:
                raise TooLargeError(
                    f"column {path} of row group {number} is {size} bytes, and {packed} in the file: more than {PACKED} "
                    "times as much"
                )
            repeated = _repeated(data, chunk)
            if "." in path and repeated * chunk.num_values > LARGEST_BATCH:
                lists.append(path)
            else:
                rows = min(rows, max(1, LARGEST_BATCH // max(1, repeated)))
        reader = pq.ParquetFile(data, buffer_size=buffered, read_dictionary=lists) if lists else file
        yield from reader.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)


def _repeated(data: Any, chunk: pq.ColumnChunkMetaData) -> int:
    """Most bytes that one value of a column chunk may unpack to: its dictionary's, or all of them if values refer to one another."""
    if chunk.physical_type != "BYTE_ARRAY":
        return 0
    if "DELTA_BYTE_ARRAY" in chunk.encodings:
        return int(chunk.total_uncompressed_size)
    if not {"PLAIN_DICTIONARY", "RLE_DICTIONARY"} & set(chunk.encodings):
        return 0
    data.seek(min(at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at))
    head = data.read(HEADER)
    # the page header, in Thrift's compact protocol, starts with the page's kind and its unpacked bytes
    kind, at = _number(head, 0)
    size, _ = _number(head, at)
    return size if kind == DICTIONARY_PAGE else int(chunk.total_uncompressed_size)


def _number(head: bytes, at: int) -> tuple[int, int]:
    """The 32-bit field at this offset, and the offset of the next field; -1 for a field of another type."""
    value = shift = 0
    if head[at : at + 1] != NEXT_FIELD_I32:
        return -1, at
    for place in range(at + 1, min(at + 6, len(head))):
        value |= (head[place] & 0x7F) << shift
        shift += 7
        if head[place] < 0x80:
            return (value >> 1) ^ -(value & 1), place + 1
    return -1, at


def sizes_of(array: pa.Array) -> Sizes:
    """Unpacked bytes of each value of an array."""
    kind, count = array.type, len(array)
    if pa.types.is_dictionary(kind):
        values = sizes_of(array.dictionary)
        places = pc.fill_null(pc.cast(array.indices, pa.int64()), len(values)).to_numpy(zero_copy_only=False)
        return np.asarray(np.append(values, 0)[places], dtype=np.int64)
    if pa.types.is_struct(kind):
        fields = (sizes_of(array.field(number)) for number in range(kind.num_fields))
        return reduce(np.add, fields, np.zeros(count, dtype=np.int64))
    if pa.types.is_map(kind):
        return _by_list(array, sizes_of(array.keys) + sizes_of(array.items))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _by_list(array, sizes_of(array.values))
    if pa.types.is_fixed_size_list(kind):
        return _sums(
            sizes_of(array.values), np.arange(array.offset, array.offset + count + 1) * kind.list_size
        )
    if isinstance(array, pa.ExtensionArray):
        return sizes_of(array.storage)
    if pa.types.is_null(kind):
        return np.zeros(count, dtype=np.int64)
    if _is_text(kind):
        lengths = pc.fill_null(pc.cast(pc.binary_length(array), pa.int64()), 0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
    try:
        return np.full(count, max(1, kind.bit_width // 8), dtype=np.int64)
    except ValueError as error:
        raise TooLargeError(f"a column of type {kind} is not read: how much it holds is not known") from error


def unpacked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without dictionaries."""
    columns = [_unpacked(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _unpacked(array: pa.Array) -> pa.Array:
    kind = array.type
    if not _has_dictionary(kind):
        return array
    if pa.types.is_dictionary(kind):
        return array.dictionary_decode()
    missing = array.is_null()
    if pa.types.is_struct(kind):
        fields = [_unpacked(array.field(number)) for number in range(kind.num_fields)]
        names = [kind.field(number).name for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, names=names, mask=missing)
    offsets = array.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    moved = pc.subtract(offsets, offsets[0])
    if pa.types.is_map(kind):
        keys, items = (_unpacked(part.slice(first, last - first)) for part in (array.keys, array.items))
        return pa.MapArray.from_arrays(moved, keys, items, mask=missing)
    values = _unpacked(array.values.slice(first, last - first))
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(moved, values, mask=missing)
    return pa.ListArray.from_arrays(moved, values, mask=missing)


def _has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(number).type) for number in range(kind.num_fields))


def _is_text(kind: pa.DataType) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in (*tests, pa.types.is_string_view, pa.types.is_binary_view))


def _by_list(array: pa.Array, values: Sizes) -> Sizes:
    return _sums(values, array.offsets.to_numpy()) + ROW // 8


def _sums(values: Sizes, offsets: NDArray[Any]) -> Sizes:
    """The sum of the values between each pair of neighbouring offsets."""
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values, dtype=np.int64)])
    return np.asarray(sums[offsets[1:]] - sums[offsets[:-1]], dtype=np.int64)
