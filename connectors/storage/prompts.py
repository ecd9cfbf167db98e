"""Reading data sources: JSONL and Parquet from any fsspec URL, row by row.

A row that cannot be used is quarantined with its reason; only a source that cannot be read at all is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from connectors.storage.store import Store
from core.errors import DataError, MissingFileError
from core.prompts import Keys, PromptRow, Quarantined, parse_line, parse_row

FORMATS = (".jsonl", ".json", ".parquet")


class Located(Keys, Protocol):
    """A source: where it lies and which columns hold what."""

    @property
    def path(self) -> str: ...


def read_source(source: Located) -> tuple[list[PromptRow], list[Quarantined]]:
    """All rows of a source: those that can be used, and those that cannot with the reason.

    Raises DataError naming the file if it is missing or of no known format.
    """
    rows: list[PromptRow] = []
    refused: list[Quarantined] = []
    for item in _items(source, source_bytes(source)):
        if isinstance(item, PromptRow):
            rows.append(item)
        else:
            refused.append(item)
    return rows, refused


def fingerprint(source: Located) -> dict[str, Any]:
    """Size and hash of a source's file, to notice that it changed under a run."""
    data = source_bytes(source)
    return {"path": source.path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def source_bytes(source: Located) -> bytes:
    """The file of a source. Raises DataError naming it."""
    if not source.path.endswith(FORMATS):
        raise DataError(
            f"source {source.name}: {source.path}: unknown format; give a file that ends in {' or '.join(FORMATS)}"
        )
    folder, _, name = source.path.rpartition("/")
    try:
        return Store(folder or ("/" if source.path.startswith("/") else ".")).read(name)
    except MissingFileError as error:
        raise DataError(
            f"source {source.name}: {source.path}: no such file; correct the source's path"
        ) from error


def _items(source: Located, data: bytes) -> Iterator[PromptRow | Quarantined]:
    if not source.path.endswith(".parquet"):
        lines = data.split(b"\n")
        if lines and not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines):
            yield parse_line(line, number, source)
        return
    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"source {source.name}: {source.path}: not a Parquet file: {error}") from error
    number = 0
    for batch in table.to_batches(max_chunksize=1024):
        for values in batch.to_pylist():
            yield parse_row(values, number, source)
            number += 1
