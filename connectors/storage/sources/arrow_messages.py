"""Checks each message of an Arrow stream before it is unpacked: its header tells how many bytes and values it unpacks to.

Owns parsing the headers, which are flatbuffers (Arrow's format/Message.fbs has the fields). Arrow has checked their offsets.
"""

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millrace.connectors.storage.sources.unpacked import ALWAYS, LARGEST_ROW, PACKED, TooLargeError

# numbers of the fields in the tables Message, DictionaryBatch and RecordBatch
HEADER_TYPE, HEADER = 1, 2
DATA = 1
LENGTH, NODES, BUFFERS, COMPRESSION = range(4)
DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # types of headers
PAIR = struct.Struct("<qq")  # a node (values, nulls) or a buffer (offset, size)
VALUE = 8  # bytes of memory that reading a value takes, even if it takes none in the file
SIZE = struct.Struct("<q")  # the start of a compressed buffer: its unpacked bytes, or AS_IT_IS
AS_IT_IS = -1


@dataclass(frozen=True)
class Content:
    """The size of a message. rows: of a record batch, else 0. size: bytes after unpacking. packed: bytes in the file."""

    rows: int
    size: int
    packed: int
    dictionary: bool


def contents(data: Any) -> Iterator[tuple[pa.Message, Content]]:
    """The messages of a stream, one at a time. Raises ArrowInvalid if the stream is torn."""
    for message in pa.ipc.MessageReader.open_stream(_Ended(data)):
        yield message, _content(message)


class CheckedStream(io.RawIOBase):
    """An Arrow stream as a file. Raises TooLargeError at a message that unpacks to far more than its size."""

    def __init__(self, data: Any, size: int) -> None:
        """size: bytes of the file."""
        self._messages = contents(data)
        self._allowed = max(ALWAYS, PACKED * size)
        self._kept = 0  # bytes of dictionaries, which stay in memory while the batches are read
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill the target from the next messages; 0 after the last one."""
        while not self._left:
            message, content = next(self._messages, (None, None))
            if message is None or content is None:
                return 0
            self._check(content)
            self._left = memoryview(message.serialize())
        count = min(len(target), len(self._left))
        target[:count], self._left = self._left[:count], self._left[count:]
        return count

    def _check(self, content: Content) -> None:
        self._kept += content.size if content.dictionary else 0
        if content.size > LARGEST_ROW and content.size > PACKED * content.packed:
            what = "a dictionary" if content.dictionary else f"a batch of {content.rows} rows"
            raise TooLargeError(
                f"{what} is {content.size} bytes, and {content.packed} in the file: more than {PACKED} times as much"
            )
        if self._kept > self._allowed:
            raise TooLargeError(
                f"its dictionaries are {self._kept} bytes, more than {PACKED} times as much as the file, and than {ALWAYS}"
            )


class _Ended(io.RawIOBase):
    """A file that never reads past its end, since a message may claim any number of bytes."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._size = data.seek(0, io.SEEK_END)
        data.seek(0)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._data.tell()
        found: bytes = self._data.read(left if size < 0 else min(size, left))
        return found


def _content(message: pa.Message) -> Content:
    head = memoryview(message.metadata)
    root = _table(head, 0)
    kind = head[at] if (at := _field(head, root, HEADER_TYPE)) else 0
    packed = message.body.size if message.body else 0
    if kind not in (DICTIONARY_BATCH, RECORD_BATCH):
        return Content(0, 0, packed, False)
    batch = _table(head, _field(head, root, HEADER))
    if kind == DICTIONARY_BATCH:
        batch = _table(head, _field(head, batch, DATA))
    at = _field(head, batch, LENGTH)
    rows = SIZE.unpack_from(head, at)[0] if at else 0
    values = rows + sum(count for count, _ in _pairs(head, batch, NODES))
    buffers = _pairs(head, batch, BUFFERS)
    if _field(head, batch, COMPRESSION):
        body = memoryview(message.body)
        sizes = sum(_unpacked(body, start, size) for start, size in buffers)
    else:
        sizes = sum(size for _, size in buffers)
    is_dictionary = kind == DICTIONARY_BATCH
    return Content(0 if is_dictionary else rows, sizes + VALUE * values, packed, is_dictionary)


def _unpacked(body: memoryview, start: int, size: int) -> int:
    """The unpacked bytes of a compressed buffer."""
    if size < SIZE.size or start < 0 or start + size > len(body):
        return 0  # the buffer is empty, or Arrow will refuse it
    said = int(SIZE.unpack_from(body, start)[0])
    return size if said == AS_IT_IS else max(0, said)


def _table(head: memoryview, at: int) -> int:
    """The position of the table to which an offset points."""
    return at + int.from_bytes(head[at : at + 4], "little")


def _field(head: memoryview, table: int, number: int) -> int:
    """The position of a table's field; 0 if the table does not have it."""
    fields = table - int.from_bytes(head[table : table + 4], "little", signed=True)
    place = 4 + 2 * number
    if place >= int.from_bytes(head[fields : fields + 2], "little"):
        return 0
    offset = int.from_bytes(head[fields + place : fields + place + 2], "little")
    return table + offset if offset else 0


def _pairs(head: memoryview, table: int, number: int) -> list[tuple[int, int]]:
    """The items of a field that is a list of pairs of numbers."""
    at = _field(head, table, number)
    if not at:
        return []
    start = _table(head, at)
    count = int.from_bytes(head[start : start + 4], "little")
    return list(PAIR.iter_unpack(head[start + 4 : start + 4 + PAIR.size * count]))
