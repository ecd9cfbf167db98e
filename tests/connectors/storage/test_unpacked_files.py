"""Files of kilobytes that stand for gigabytes, and rows that say two things: refused by name, before they are unpacked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.connectors.storage.prompts import first_rows, read_source
from millrace.connectors.storage.sources.addressed import AddressedRows
from millrace.connectors.storage.sources.unpacked import LARGEST_ROW
from millrace.core.config.data import Source
from millrace.core.errors import DataError

TWO_MB = "a" * (2 << 20)
MEMORY = 700 << 20  # bytes beyond what a process holds that has imported all
PROCESS = f"""
import json, resource, sys
from pathlib import Path
import pyarrow.parquet, pandas
from millrace.connectors.storage.prompts import first_rows, read_source
from millrace.core.config.data import Source
from millrace.core.errors import DataError

held = 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
resource.setrlimit(resource.RLIMIT_DATA, (held + {MEMORY}, held + {MEMORY}))
said = {{}}
for path in sys.argv[1:]:
    source = Source(name="s", path=path)
    for read in (lambda: first_rows(source, 20_000, 8 << 20), lambda: read_source(source)):
        try:
            said.setdefault(path, []).append(str(len(read()[0])))
        except DataError as error:
            said.setdefault(path, []).append(str(error))
        except MemoryError:
            said.setdefault(path, []).append("no memory")
print(json.dumps(said))
"""


def repeated(count: int, value: str) -> pa.Array:
    """A text that stands in the file once, for all rows."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, dtype=np.int32)), pa.array([value]))


def messages(rows: int, each: int, value: str) -> pa.Array:
    parts = [repeated(rows * each, "user"), repeated(rows * each, value)]
    items = pa.StructArray.from_arrays(parts, names=["role", "content"])
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * each), items)


LARGE: dict[str, tuple[Callable[[], pa.Array], str]] = {
    "a text of one letter": (lambda: pa.array(["a" * (150 << 20)]), "times as much"),
    "a long text for all rows": (lambda: repeated(3_000, TWO_MB), "times as much"),
    "a message for all of a row": (lambda: messages(20, 300, TWO_MB), "row 0 is"),
    "messages for all rows": (lambda: messages(1_000, 3, TWO_MB), "times as much"),
    "more rows than bytes": (lambda: repeated(1_000_000, "a"), "times as much"),
}


def streamed(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def zeros(size: int) -> pa.Array:
    """One long text, of memory that is taken when it is written to, which is never."""
    ends = pa.py_buffer(np.array([0, size], dtype=np.int32))
    return pa.StringArray.from_buffers(1, ends, pa.py_buffer(np.zeros(size, dtype=np.uint8)))


def one_column(path: Path, *parts: pa.Array) -> None:
    batches = [pa.record_batch([part], ["prompt"]) for part in parts]
    streamed(path, batches[0].schema, batches)


def of_dictionaries(path: Path) -> None:
    """Each is too small to be refused, and is kept while the rows are read."""
    letters = zeros(100 << 20)
    columns = {"prompt": repeated(1, "b")}
    columns |= {f"x{number}": pa.DictionaryArray.from_arrays(pa.array([0]), letters) for number in range(9)}
    batch = pa.record_batch(columns)
    streamed(path, batch.schema, [batch])


def nulls_of_nulls(path: Path) -> None:
    """A list whose items take no byte."""
    offsets = pa.array([0, 10**9], pa.int32())
    one_column(path, pa.ListArray.from_arrays(offsets, pa.nulls(10**9)))


def body_that_ends_early(path: Path) -> None:
    """A message says that it has 2**46 bytes."""
    one_column(path, pa.array(["a"]))
    whole = path.read_bytes()
    with pa.OSFile(str(path)) as file:
        *_, (at, size) = bodies_of(file)
    said = size.to_bytes(8, "little")
    head, found, tail = whole[:at].rpartition(said)
    assert found
    path.write_bytes(head + (1 << 46).to_bytes(8, "little") + tail + whole[at:])


def bodies_of(file: Any) -> Iterator[tuple[int, int]]:
    """Where the body of each message begins, and its bytes."""
    reader = pa.ipc.MessageReader.open_stream(file)
    for message in reader:
        size = message.body.size if message.body else 0
        yield file.tell() - size, size


ARROW: dict[str, tuple[Callable[[Path], None], str]] = {
    "a text of one letter": (lambda path: one_column(path, zeros(900 << 20)), "times as much"),
    "a dictionary of one letter": (
        lambda path: one_column(path, pa.DictionaryArray.from_arrays(pa.array([0]), zeros(900 << 20))),
        "times as much",
    ),
    "dictionaries": (of_dictionaries, "times as much"),
    "rows of nothing": (lambda path: one_column(path, pa.nulls(2 * 10**9)), "times as much"),
    "items of nothing": (nulls_of_nulls, "times as much"),
    "a body that ends early": (body_that_ends_early, "not a whole Arrow file"),
}


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["a text of one letter", "a message for all of a row"], id="at once"),
        pytest.param([*LARGE], id="all", marks=pytest.mark.slow),
    ],
)
def test_small_files_of_gigabytes_are_refused_in_little_memory(kinds: list[str], tmp_path: Path) -> None:
    paths = {}
    for kind in kinds:
        make = LARGE[kind][0]
        paths[kind] = tmp_path / f"{len(paths)}.parquet"
        table = pa.table({"prompt": make()})
        pq.write_table(
            table, paths[kind], dictionary_pagesize_limit=1 << 30, store_schema=False, compression="zstd"
        )
        assert paths[kind].stat().st_size < 64 << 10
    said = read_in_little_memory(paths)
    for kind in kinds:
        why = LARGE[kind][1]
        checked, trained = said[kind]
        assert why in trained, (kind, trained)
        # a check reads the first megabytes alone, and need not reach the end
        assert why in checked or checked.isdigit(), (kind, checked)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([*ARROW][:1] + [*ARROW][-3:], id="at once"),
        pytest.param([*ARROW], id="all", marks=pytest.mark.slow),
    ],
)
def test_so_are_small_arrow_files_of_gigabytes(kinds: list[str], tmp_path: Path) -> None:
    """A message is refused before it is unpacked: its head says how much it is."""
    paths = {kind: tmp_path / f"{number}.arrow" for number, kind in enumerate(kinds)}
    for kind, path in paths.items():
        ARROW[kind][0](path)
        assert path.stat().st_size < 128 << 10, kind
    for kind, told in read_in_little_memory(paths).items():
        assert all(ARROW[kind][1] in each for each in told), (kind, told)


def read_in_little_memory(paths: Mapping[str, Path]) -> dict[str, list[str]]:
    """What a check and a run say to each of the files, in a process that has no room for one of them unpacked."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *map(str, paths.values())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    return {kind: said[str(path)] for kind, path in paths.items()}


@pytest.mark.slow
def test_a_line_that_is_too_long_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.write(
            json.dumps({"prompt": "a" * (LARGEST_ROW + (3 << 20))})
            + "\n"
            + json.dumps({"prompt": "b"})
            + "\n"
        )
    source = Source(name="s", path=str(path))
    rows, refused = read_source(source)
    assert [row.prompt for row in rows] == ["b"]
    assert [item.reason.split(":")[0] for item in refused] == ["too long"]


NESTED: dict[str, Any] = {
    "prompt": [[{"role": "user", "content": "x" * (number + 1)}] * (number % 3 + 1) for number in range(300)],
    "label": ["y" * (number % 7) + "z" for number in range(300)],
    "metadata": [{"a": "q", "b": {"c": ["x"]}} if number % 3 else None for number in range(300)],
    "tags": [["q" * 20, "r"] if number % 4 else None for number in range(300)],
    "map": pa.array(
        [[("a", "b" * 9)] * (number % 3 + 1) for number in range(300)], pa.map_(pa.string(), pa.string())
    ),
    "pair": pa.array([[1, number % 9] for number in range(300)], pa.list_(pa.int8(), 2)),
    "kind": pa.array(["a", "b"] * 150).dictionary_encode(),
    "none": pa.nulls(300),
    "huge": pa.array(["z"] * 300, pa.large_string()),
}


@pytest.mark.parametrize("form", ["parquet", "delta", "arrow"])
def test_what_is_unpacked_bit_by_bit_is_what_was_written(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table(NESTED)
    path = tmp_path / f"rows.{'arrow' if form == 'arrow' else 'parquet'}"
    if form == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    else:
        options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {"label": "DELTA_BYTE_ARRAY"}}
        pq.write_table(table, path, row_group_size=70, **(options if form == "delta" else {}))
    # so that messages stay references, and batches are cut by their bytes
    monkeypatch.setattr("millrace.connectors.storage.sources.unpacked.LARGEST_BATCH", 4_000)
    monkeypatch.setattr("millrace.connectors.storage.sources.unpacked.BATCH", 9_000)
    extra = ["tags", "map", "pair", "kind", "huge"]
    source = Source(name="s", path=str(path), extra_keys=extra)
    rows, refused = read_source(source)
    assert refused == []
    assert [row.prompt for row in rows] == NESTED["prompt"]
    written = table.select(extra).to_pylist()
    for row, values in zip(rows, written, strict=True):
        expected = {name: dict(value) if name == "map" else value for name, value in values.items()}
        assert {name: row.metadata[name] for name in extra if name in row.metadata} == {
            name: value for name, value in expected.items() if name in row.metadata
        }
        assert row.metadata["pair"] == values["pair"]
    drawn = AddressedRows(source)
    assert [item.prompt for item in drawn.read(range(300)) if hasattr(item, "prompt")] == NESTED["prompt"]
    assert first_rows(source, 20_000, 8 << 20).total == 300


def _twice(column: str) -> pa.Table:
    inner = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    if column == "fields":
        return pa.Table.from_arrays([inner], names=["row"])
    return pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])


@pytest.mark.parametrize(
    ("columns", "key", "named"), [("columns", "prompt", "prompt"), ("fields", "row.prompt", "row.prompt")]
)
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(
    columns: str, key: str, named: str, form: str, tmp_path: Path
) -> None:
    table, path = _twice(columns), tmp_path / f"rows.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    source = Source(name="s", path=str(path), prompt_key=key)
    for read in (
        lambda: read_source(source),
        lambda: first_rows(source, 10, 1 << 20),
        lambda: AddressedRows(source),
    ):
        with pytest.raises(DataError, match=f"two columns named {named}"):
            read()


@pytest.mark.parametrize("key", ["prompt", "label", "tags"])
def test_a_row_that_says_a_key_twice_is_refused(key: str, tmp_path: Path) -> None:
    rows = [
        f'{{"prompt": "a", "label": "b", "tags": 1, "{key}": "c"}}',
        '{"prompt": "a", "label": "b", "tags": 1, "other": 1, "other": 2}',
        '{"prompt": "a", "label": "b", "tags": {"x": 1, "x": 2}}',
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    found, refused = read_source(Source(name="s", path=str(path), extra_keys=["tags"]))
    assert [(item.row, item.reason) for item in refused] == [(0, f"two values: the key {key} stands twice")]
    assert len(found) == 2


def test_rows_that_were_not_counted_are_called_about_as_many(tmp_path: Path) -> None:
    """39 of 41 rows were read, and looked like all of about 39."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * size}) + "\n" for size in (*[85] * 40, 1)))
    found = first_rows(Source(name="s", path=str(path)), 100, 4_000)
    assert (len(found.usable), found.total, found.whole) == (39, 39, False)
    path.write_text("".join(json.dumps({"prompt": "a" * 10}) + "\n" for _ in range(17)))
    assert first_rows(Source(name="s", path=str(path)), 100, 4_000)[2:] == (17, True)
