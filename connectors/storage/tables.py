"""Parquet bytes of tables whose schemas core.schema owns.

zstd level 1, no dictionaries, byte-stream split for log-probabilities. Kind and version travel in the file.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from core import schema
from core.errors import CorruptFileError


def encode(table: pa.Table, kind: str) -> bytes:
    """A table as Parquet bytes. Raises pyarrow.ArrowInvalid for a table that does not fit its schema (a defect)."""
    wanted = schema.schema(kind)
    cast = table.select(wanted.names).cast(wanted)
    sink = pa.BufferOutputStream()
    pq.write_table(
        cast,
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        use_byte_stream_split=_floats(wanted),
    )
    return bytes(sink.getvalue())


def decode(data: bytes, kind: str, name: str, columns: list[str] | None = None) -> pa.Table:
    """A table from Parquet bytes. Raises CorruptFileError naming the file and what is wrong with it."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        found = file.schema_arrow
        meta = found.metadata or {}
        if meta.get(b"millrace.table", b"").decode() != kind or meta.get(
            b"millrace.version", b""
        ).decode() != str(schema.VERSION):
            raise CorruptFileError(
                f"{name}: holds {meta.get(b'millrace.table', b'no millrace table').decode()} version "
                f"{meta.get(b'millrace.version', b'?').decode()}, wanted {kind} version {schema.VERSION}; "
                "read it with the release that wrote it"
            )
        return file.read(columns=columns, use_threads=False)
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise CorruptFileError(
            f"{name}: not a whole Parquet file: {error}; restore it or remove the part"
        ) from error


def describe(data: bytes) -> tuple[int, str]:
    """Rows and kind of a table file that is known to be whole."""
    file = pq.ParquetFile(pa.BufferReader(data))
    return file.metadata.num_rows, (file.schema_arrow.metadata or {}).get(b"millrace.table", b"").decode()


def _floats(wanted: pa.Schema) -> list[str]:
    return [
        f"{field.name}.list.element"
        for field in wanted
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    ]
