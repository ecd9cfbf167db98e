"""Rows of one file of prompts: JSONL, Parquet, or Arrow as `save_to_disk` writes it.

Owns reading block by block and row by row; core decides which rows are usable. Every row gives one item, in file order.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.connectors.storage.sources.arrow_messages import CheckedStream, contents
from millrace.connectors.storage.sources.locate import DataFiles, Located, where
from millrace.connectors.storage.sources.unpacked import (
    LARGEST_ROW,
    TooLargeError,
    Unpacking,
    parquet_batches,
)
from millrace.connectors.storage.store import Store
from millrace.core.contracts.rows.prompts import (
    PromptRow,
    Quarantined,
    column_of,
    parse_line,
    parse_row,
    refuse,
)
from millrace.core.errors import DataError, MissingColumnError

HEAD = 1 << 20
MARK = b"\xef\xbb\xbf"  # the byte order mark that some editors write at the start of a file
Item = PromptRow | Quarantined


def rows_of(source: Located, files: DataFiles, head: bool = False) -> Iterator[Item]:
    """The rows of all files in order, numbered across files. Ignores a slice.

    head: the caller needs only the first rows, so a file is not read whole.
    """
    first = 0
    for name in files.names:
        reader = _Reader(source, files.store, name, files.one)
        for item in reader.rows(first, head):
            yield item
            first = item.row + 1


def count_rows(source: Located, files: DataFiles, number: int, size: int, most: int) -> tuple[int, bool]:
    """The number of rows of a file, and whether it is exact: lines of a file larger than `most` bytes are estimated."""
    name = files.names[number]
    return _Reader(source, files.store, name, files.one).count(size, most)


def line_of(line: bytes, number: int, source: Located) -> Item:
    """Parse a line of JSONL; a line of more than LARGEST_ROW bytes is refused unparsed."""
    if len(line) > LARGEST_ROW:
        return refuse(
            source, number, f"too long: more than {LARGEST_ROW} bytes", line[:80].decode("utf-8", "replace")
        )
    return parse_line(line, number, source)


def batches_of(source: Located, files: DataFiles, name: str) -> Iterator[pa.RecordBatch]:
    """The needed columns of a Parquet or Arrow file, a batch at a time. Raises DataError if it is not such a file."""
    return _Reader(source, files.store, name, files.one).batches()


def parse_batch(source: Located, batch: pa.RecordBatch, first: int) -> Iterator[Item]:
    """The rows of a batch; `first` is the number of the first one."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield refuse(source, first, f"not UTF-8: byte {error.start}", repr(error.object[:80]))
            return
        half = batch.num_rows // 2
        yield from parse_batch(source, batch.slice(0, half), first)
        yield from parse_batch(source, batch.slice(half), first + half)
        return
    prompt = column_of(source.prompt_key, batch.schema.names)
    for number, values in enumerate(rows, first):
        # with a key for the prompt, so that a null prompt is reported as null, not as missing
        held = {prompt: None, **without_nulls_of_tables(values)}
        yield parse_row(held, number, source)


def without_nulls_of_tables(value: Any) -> Any:
    """A value of a table without its null fields: a table gives each object the fields of all other rows' objects.

    A null that was written on purpose cannot be told apart, and goes too. Nulls in lists and maps stay: other rows add nothing
    to those.
    """
    if isinstance(value, dict):
        return {name: without_nulls_of_tables(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) for item in value):  # a map
            return {str(name): without_nulls_of_tables(item) for name, item in value}
        return [without_nulls_of_tables(item) for item in value]
    return value


class _Reader:
    """Reads one file."""

    def __init__(self, source: Located, store: Store, name: str, one: bool) -> None:
        self._source, self._store, self._name = source, store, name
        self._where = where(source) if one else f"{where(source)}: {name}"

    def rows(self, first: int, head: bool) -> Iterator[Item]:
        """Its rows; `first` is the number of the first one."""
        if not self._name.endswith((".parquet", ".arrow")):
            for number, line in enumerate(lines(self._store.blocks(self._name)), first):
                yield line_of(line.removeprefix(MARK) if number == first else line, number, self._source)
            return
        with ExitStack() as stack:
            data = (
                stack.enter_context(self._open()) if head else pa.BufferReader(self._store.read(self._name))
            )
            for batch in self._read(data, HEAD if head else 0):
                yield from parse_batch(self._source, batch, first)
                first += batch.num_rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The needed columns, a batch at a time; the file is not read whole."""
        with self._open() as data:
            yield from self._read(data, HEAD)

    def count(self, size: int, most: int) -> tuple[int, bool]:
        """The number of its rows, and whether it is exact."""
        if self._name.endswith(".parquet"):
            with self._open() as data:
                return int(self._checked(lambda: pq.ParquetFile(data).metadata.num_rows)), True
        if self._name.endswith(".arrow"):
            with self._open() as data:
                return int(self._checked(lambda: sum(content.rows for _, content in contents(data)))), True
        if size <= most:
            return sum(1 for _ in lines(self._store.blocks(self._name))), True
        start = self._store.fs.cat_file(f"{self._store.root}/{self._name}", start=0, end=HEAD)
        return round(max(1, start.count(b"\n")) * size / len(start)), False

    def _open(self) -> Any:
        return self._store.fs.open(f"{self._store.root}/{self._name}", "rb")

    def _read(self, data: Any, buffered: int) -> Iterator[pa.RecordBatch]:
        """Batches of the needed columns, a few rows each. Raises DataError if they unpack to far more than the file's size."""
        size = data.size() if isinstance(data, pa.NativeFile) else data.size
        unpacking = Unpacking(size)
        try:
            if self._name.endswith(".parquet"):
                columns = self._columns(pq.ParquetFile(data, buffer_size=buffered).schema_arrow)
                for batch in parquet_batches(data, buffered, columns):
                    yield from unpacking.batches(batch)
                return
            stream = pa.ipc.open_stream(CheckedStream(data, size))
            columns = self._columns(stream.schema)
            for batch in stream:
                yield from unpacking.batches(batch.select(columns))
        except (pa.ArrowException, OSError) as error:
            raise self._torn(error) from error
        except TooLargeError as error:
            raise DataError(
                str(error), where=self._where, remedy="leave such rows out, or write them as JSONL"
            ) from error

    def _columns(self, schema: pa.Schema) -> list[str]:
        """The columns to read. Raises MissingColumnError without a prompt column, DataError if a name occurs twice."""
        source, names = self._source, schema.names
        own = (
            *(source.tools_key, source.chat_template_kwargs_key, source.sampling_key, source.images_key),
            *source.extra_keys,
        )
        keys = (source.prompt_key, source.label_key, source.metadata_key, *own)
        wanted = {column_of(key, names) for key in keys if key}
        columns = [column for column in names if column in wanted]
        prompt = column_of(source.prompt_key, names)
        if prompt not in columns:
            raise MissingColumnError(
                f"has no column {prompt}, only {', '.join(names)}",
                where=self._where,
                remedy="set the source's prompt_key",
            )
        for column in columns:
            if twice := _twice(schema, column):
                raise DataError(
                    f"has two columns named {twice}", where=self._where, remedy="leave out one of them"
                )
        return columns

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (pa.ArrowException, OSError) as error:
            raise self._torn(error) from error

    def _torn(self, error: Exception) -> DataError:
        kind = "Parquet" if self._name.endswith(".parquet") else "Arrow"
        return DataError(f"not a whole {kind} file: {error}", where=self._where, remedy="write it again")


def _twice(schema: pa.Schema, column: str) -> str:
    """A name that occurs twice among the columns, or among a column's fields; "" if none does."""
    if schema.names.count(column) > 1:
        return column
    fields = [(column, schema.field(column).type)]
    while fields:
        name, kind = fields.pop()
        inner = [kind.field(number) for number in range(kind.num_fields)]
        names = [field.name for field in inner]
        if twice := next((part for part in names if names.count(part) > 1), ""):
            return f"{name}.{twice}"
        fields += [(f"{name}.{field.name}", field.type) for field in inner]
    return ""


def lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a file that is read in blocks. Text after the last newline is a line too. A line that is too long is cut."""
    rest: list[bytes] = []
    held = 0
    for block in blocks:
        first, *others = block.split(b"\n")
        if held <= LARGEST_ROW:
            rest.append(first)
        held = len(others[-1]) if others else held + len(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = others[-1:]
    last = b"".join(rest)
    if last:
        yield last
