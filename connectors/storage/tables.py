"""Encodes and decodes tables as Parquet; millrace.core.contracts.schema owns their schemas.

zstd level 1, no dictionaries, byte-stream split for log-probabilities, a checksum per page. The file's metadata holds kind
and version.
"""

import io
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError

MAGIC = b"PAR1"


def encode(table: pa.Table, kind: str) -> bytes:
    """A table as Parquet bytes, in one row group. Raises as `encode_pieces` does."""
    return b"".join(encode_pieces([table], kind))


def encode_pieces(tables: Iterable[pa.Table], kind: str) -> Iterator[bytes]:
    """Tables as the bytes of one Parquet file, each table a row group. One of them is in memory at a time.

    Raises ValueError or KeyError if a table does not fit its schema, which is a defect of millrace.
    """
    wanted, sink = schema.schema(kind), _Passing()
    with pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"),
        wanted,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        use_byte_stream_split=_floats(wanted),
        write_page_checksum=True,
    ) as writer:
        for table in tables:
            writer.write_table(_fitting(table, wanted, kind), row_group_size=max(1, table.num_rows))
            yield from sink.passed()
    yield from sink.passed()


def _fitting(table: pa.Table, wanted: pa.Schema, kind: str) -> pa.Table:
    cast = table.select(wanted.names).cast(wanted)
    for name, column in zip(wanted.names, cast.columns, strict=True):
        if column.null_count and not wanted.field(name).nullable:
            raise ValueError(f"{kind}.{name}: {column.null_count} nulls in a column that may hold none")
    return cast


class _Passing(io.RawIOBase):
    """A file in memory whose content is handed out, block by block, while it is written."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._blocks.append(bytes(data))
        self._size += len(self._blocks[-1])
        return len(self._blocks[-1])

    def tell(self) -> int:
        return self._size

    def passed(self) -> list[bytes]:
        blocks, self._blocks = self._blocks, []
        return blocks


def decode(data: bytes | BinaryIO, kind: str | None, name: str, columns: list[str] | None = None) -> pa.Table:
    """A table from Parquet bytes or an open file, of any of millrace's kinds if `kind` is None.

    Raises CorruptFileError naming the file and the problem.
    """
    try:
        file = _open(data)
        stored = file.schema_arrow
        stored_kind = _kind(stored)
        wanted = schema.schema(kind or stored_kind) if (kind or stored_kind) in schema.SCHEMAS else None
        version = (stored.metadata or {}).get(b"millrace.version", b"none").decode(errors="replace")
        if wanted is None or stored_kind != wanted.metadata[b"millrace.table"].decode():
            raise CorruptFileError(
                f"holds {stored_kind or 'no table of millrace'}, wanted {kind or 'any of its tables'}",
                where=name,
            )
        if version != str(schema.VERSION):
            raise CorruptFileError(
                f"{stored_kind} of schema version {version}, wanted {schema.VERSION}",
                where=name,
                remedy="read it with the millrace that wrote it",
            )
        if not stored.equals(wanted):
            differing = [field.name for field in wanted if field not in list(stored)]
            raise CorruptFileError(
                f"{stored_kind}: columns {differing} are not as the schema says", where=name
            )
        return file.read(columns=columns, use_threads=False)
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"not a whole Parquet file: {error}", where=name) from error


def describe(data: bytes | BinaryIO, name: str) -> tuple[int, str | None]:
    """Rows and kind of a table file. Raises CorruptFileError naming it."""
    try:
        file = _open(data)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise CorruptFileError(f"not a whole Parquet file: {error}", where=name) from error
    return file.metadata.num_rows, _kind(file.schema_arrow) or None


def check_ends(file: BinaryIO, name: str) -> None:
    """Raise CorruptFileError if an open file does not start and end with Parquet's magic bytes; rewinds the file."""
    first = file.read(len(MAGIC))
    file.seek(-len(MAGIC), io.SEEK_END)
    last = file.read(len(MAGIC))
    file.seek(0)
    if (first, last) != (MAGIC, MAGIC):
        raise CorruptFileError("not a whole Parquet file: it does not begin and end as one", where=name)


def _open(data: bytes | BinaryIO) -> pq.ParquetFile:
    source = pa.BufferReader(data) if isinstance(data, bytes) else pa.PythonFile(data, mode="r")
    return pq.ParquetFile(source, page_checksum_verification=True)


def _kind(stored: pa.Schema) -> str:
    return str((stored.metadata or {}).get(b"millrace.table", b""), errors="replace")


def _floats(wanted: pa.Schema) -> list[str]:
    return [
        f"{field.name}.list.element"
        for field in wanted
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    ]
