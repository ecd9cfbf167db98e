"""Data sources: JSONL and Parquet files at any fsspec URL, read block by block and row by row.

A row that cannot be used is quarantined with the reason. A source that cannot be read at all is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO, Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.connectors.storage.faults import retried
from millrace.connectors.storage.store import Store, split_url
from millrace.core.contracts.prompts import (
    Keys,
    PromptRow,
    Quarantined,
    SourceFingerprint,
    column_of,
    parse_line,
    parse_row,
    refuse,
    require_labels,
)
from millrace.core.errors import DataError, MissingColumnError, MissingFileError

FORMATS = (".jsonl", ".json", ".parquet")
BATCH_ROWS = 1024
HEAD = 1 << 20


class Located(Keys, Protocol):
    """A data source: its path and the names of its columns."""

    @property
    def path(self) -> str: ...


def read_source(source: Located) -> tuple[list[PromptRow], list[Quarantined]]:
    """The usable rows of a source, and the quarantined ones with their reasons, both in file order.

    Raises DataError naming the file if it is missing, of an unknown format or a broken Parquet file.
    """
    store, name = _locate(source)
    rows, quarantined = _separate(source, _items(source, store, name))
    rows, unlabelled = require_labels(rows, source)
    return rows, sorted(quarantined + unlabelled, key=lambda item: item.row)


class FirstRows(NamedTuple):
    """The first rows of a source. `total`: rows of the file, or about as many; `whole`: these are all."""

    usable: list[PromptRow]
    refused: list[Quarantined]
    total: int
    whole: bool


def first_rows(source: Located, count: int, size: int) -> FirstRows:
    """The first rows of a source, at most `count` and about `size` bytes of them, for a check before anything starts.

    Raises as `read_source` does, and StorageError if the storage does not answer soon.
    """
    store, name = _locate(source)
    total = 0

    def head() -> list[PromptRow | Quarantined]:
        nonlocal total
        path = f"{store.root}/{name}"
        held = store.fs.size(path)
        if name.endswith(".parquet"):
            with store.fs.open(path, "rb") as file:
                total = _parquet_rows(source, file)
                file.seek(0)
                return list(_until(islice(_parquet(source, file, buffered=HEAD), count), size))
        data = store.fs.cat_file(path, start=0, end=min(held, size)) if held else b""
        lines = list(_lines([data]))
        if held > size and len(lines) > 1:
            lines = lines[:-1]  # the last one is cut
        total = round(len(lines) * held / max(1, len(data)))
        return [parse_line(line, number, source) for number, line in enumerate(lines[:count])]

    rows, refused = _separate(source, lambda: retried("read", store.url_of(name), head, probe=True))
    whole = len(rows) + len(refused) == total
    if whole:
        rows, unlabelled = require_labels(rows, source)
        refused = sorted(refused + unlabelled, key=lambda item: item.row)
    return FirstRows(rows, refused, total, whole)


def _until(rows: Iterable[PromptRow | Quarantined], size: int) -> Iterator[PromptRow | Quarantined]:
    """The first rows, up to about so many characters of prompts."""
    for row in rows:
        yield row
        size -= len(str(row.prompt)) if isinstance(row, PromptRow) else 0
        if size <= 0:
            return


def _separate(
    source: Located, items: Callable[[], Iterable[PromptRow | Quarantined]]
) -> tuple[list[PromptRow], list[Quarantined]]:
    rows: list[PromptRow] = []
    quarantined: list[Quarantined] = []
    try:
        for item in items():
            if isinstance(item, PromptRow):
                rows.append(item)
            else:
                quarantined.append(item)
    except MissingFileError as error:
        raise DataError("no such file", where=_where(source), remedy="correct the source's path") from error
    return rows, quarantined


def _items(source: Located, store: Store, name: str) -> Callable[[], Iterable[PromptRow | Quarantined]]:
    if name.endswith(".parquet"):
        return lambda: _parquet(source, pa.BufferReader(store.read(name)))
    return lambda: _jsonl(source, store, name)


def fingerprint(
    source: Located, usable: Iterable[PromptRow], quarantined: Iterable[Quarantined]
) -> SourceFingerprint:
    """Size, hash and row counts of a source, from its rows as read."""
    store, name = _locate(source)
    hashed, size = hashlib.sha256(), 0
    for block in store.blocks(name):
        hashed.update(block)
        size += len(block)
    good = list(usable)
    rows = len(good) + sum(1 for _ in quarantined)
    return SourceFingerprint.of(source.path, size, hashed.hexdigest(), rows, good)


def _where(source: Located) -> str:
    return f"source {source.name}: {source.path}"


def _locate(source: Located) -> tuple[Store, str]:
    if not source.path.endswith(FORMATS):
        raise DataError(
            "unknown format", where=_where(source), remedy=f"give a file that ends in {' or '.join(FORMATS)}"
        )
    return split_url(source.path)


def _jsonl(source: Located, store: Store, name: str) -> Iterator[PromptRow | Quarantined]:
    for number, line in enumerate(_lines(store.blocks(name))):
        yield parse_line(line, number, source)


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a file that is read in blocks. Text after the last newline is a line too."""
    rest: list[bytes] = []
    for block in blocks:
        first, *others = block.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = others[-1:]
    last = b"".join(rest)
    if last:
        yield last


def _parquet_rows(source: Located, data: IO[bytes]) -> int:
    try:
        return int(pq.ParquetFile(data).metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise _torn(source, error) from error


def _torn(source: Located, error: Exception) -> DataError:
    return DataError(f"not a whole Parquet file: {error}", where=_where(source), remedy="write it again")


def _parquet(source: Located, data: IO[bytes], buffered: int = 0) -> Iterator[PromptRow | Quarantined]:
    number = 0
    try:
        file = pq.ParquetFile(data, buffer_size=buffered)
        names = file.schema_arrow.names
        keys = (source.prompt_key, source.label_key, source.metadata_key, *source.extra_keys)
        wanted = {column_of(key, names) for key in keys if key}
        columns = [column for column in names if column in wanted]
        if column_of(source.prompt_key, names) not in columns:
            raise MissingColumnError(
                f"has no column {column_of(source.prompt_key, names)}, only {', '.join(names)}",
                where=_where(source),
                remedy="set the source's prompt_key",
            )
        for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
            yield from _batch(source, batch, number)
            number += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _torn(source, error) from error


def _batch(source: Located, batch: pa.RecordBatch, first: int) -> Iterator[PromptRow | Quarantined]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield refuse(source, first, f"not UTF-8: byte {error.start}", repr(error.object[:80]))
            return
        half = batch.num_rows // 2
        yield from _batch(source, batch.slice(0, half), first)
        yield from _batch(source, batch.slice(half), first + half)
        return
    for number, values in enumerate(rows, first):
        yield parse_row(values, number, source)
