"""Which files a source's path names, in which order, and which of their rows a slice takes; on every kind of storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.connectors.storage.prompts import (
    fingerprint,
    first_rows,
    read_source,
    size_and_hash,
)
from millrace.connectors.storage.sources.addressed import AddressedRows
from millrace.connectors.storage.sources.locate import is_absent
from millrace.connectors.storage.store import Store
from millrace.core.config.data import Source
from millrace.core.contracts.rows.prompts import PromptRow, SourceFingerprint, source_changes
from millrace.core.contracts.source_path import source_path
from millrace.core.errors import DataError

SIZE = 1 << 20


def row(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}+1=", "label": str(number + 1)}


def jsonl(numbers: range) -> bytes:
    return b"".join(json.dumps(row(number)).encode() + b"\n" for number in numbers)


def parquet(numbers: range) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([row(number) for number in numbers]), sink)
    return bytes(sink.getvalue())


def arrow(numbers: range) -> bytes:
    """A file as save_to_disk of Hugging Face's datasets writes it."""
    table = pa.Table.from_pylist([row(number) for number in numbers])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


def saved(store: Store, folder: str, parts: list[range]) -> None:
    """A folder as save_to_disk writes it."""
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, numbers in zip(names, parts, strict=True):
        store.write(f"{folder}/{name}", arrow(numbers))
    store.write_json(f"{folder}/state.json", {"_data_files": [{"filename": name} for name in names]})
    store.write_json(f"{folder}/dataset_info.json", {"features": {}})


def prompts_of(source: Source) -> list[int]:
    """The numbers of the rows that are read; the check sees the same ones under the same numbers."""
    rows, quarantined = read_source(source)
    seen = first_rows(source, 1000, SIZE)
    assert (seen.usable, seen.refused) == (rows, quarantined)
    assert (seen.total, seen.whole) == (len(rows) + len(quarantined), True)
    return [int(str(item.prompt).partition("+")[0]) for item in rows]


def printed(source: Source) -> SourceFingerprint:
    return fingerprint(source, *read_source(source))


def test_a_folder_a_pattern_and_a_saved_data_set_are_read_in_order(root: str) -> None:
    store = Store(root)
    store.write("data/b.parquet", parquet(range(4, 6)))
    store.write("data/a.jsonl", jsonl(range(4)))
    store.write("data/c.jsonl", b"\xef\xbb\xbf" + jsonl(range(6, 8)))
    store.write("data/notes.md", b"no rows")
    store.write("data/_draft.jsonl", jsonl(range(90, 91)))
    store.write("data/deep/d.jsonl", jsonl(range(8, 9)))
    saved(store, "set/train", [range(5), range(5, 9)])
    saved(store, "set/test", [range(2)])
    store.write_json("set/dataset_dict.json", {"splits": ["train", "test"]})
    url = store.url_of
    for path in ("data", "data/"):
        source = Source(path=url(path))
        assert prompts_of(source) == list(range(8))
        assert [item.row for item in read_source(source)[0]] == list(range(8))
    assert prompts_of(Source(path=url("data/[ac].jsonl"))) == [0, 1, 2, 3, 6, 7]
    assert prompts_of(Source(path=url("data/**/d.jsonl"))) == [8]
    assert prompts_of(Source(path=url("d*/a.jsonl"))) == [0, 1, 2, 3]
    assert prompts_of(Source(path=url("set/train"))) == list(range(9))
    assert prompts_of(Source(path=url("set/test/data-00000-of-00001.arrow"))) == [0, 1]
    with pytest.raises(
        DataError, match=r"saved data set with the splits train, test; name one: .*set/train$"
    ):
        read_source(Source(path=url("set")))


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "set[1].jsonl").write_bytes(jsonl(range(3)))
    (tmp_path / "set1.jsonl").write_bytes(jsonl(range(1)))
    source = Source(path=str(tmp_path / "set[1].jsonl"))
    assert prompts_of(source) == [0, 1, 2]
    assert printed(source).files == {}
    assert prompts_of(Source(path=str(tmp_path / "set[12].jsonl"))) == [0]


def test_links_in_a_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(jsonl(range(2)))
    (tmp_path / "data" / "train.jsonl").symlink_to(tmp_path / "blobs" / "1")
    assert prompts_of(Source(path=str(tmp_path / "data"))) == [0, 1]
    assert prompts_of(Source(path=str(tmp_path / "data" / "*.jsonl"))) == [0, 1]


@pytest.mark.parametrize("kind", ["one.jsonl", "one.parquet", "one.arrow", "data", "data/*"])
@pytest.mark.parametrize(
    "bounds", [":", "2:5", ":3", "7:", "-2:", ":-7", "-4:-1", "3:-3", "5:2", "-100:2", "8:100", "40:"]
)
def test_a_slice_takes_what_a_list_would_and_rows_keep_their_numbers(
    tmp_path: Path, kind: str, bounds: str
) -> None:
    store = Store(str(tmp_path))
    numbers = range(10)
    for name, write in (("one.jsonl", jsonl), ("one.parquet", parquet), ("one.arrow", arrow)):
        store.write(name, write(numbers))
    store.write("data/0.jsonl", jsonl(range(3)))
    store.write("data/1.parquet", parquet(range(3, 8)))
    store.write("data/2.jsonl", jsonl(range(8, 10)))
    source = Source(path=f"{store.url_of(kind)}@[{bounds}]")
    first, _, last = bounds.partition(":")
    wanted = list(numbers)[int(first) if first else None : int(last) if last else None]
    assert prompts_of(source) == wanted
    whole = {item.row: item for item in read_source(Source(path=store.url_of(kind)))[0]}
    assert read_source(source)[0] == [whole[number] for number in wanted]


@given(st.integers(-9, 9) | st.none(), st.integers(-9, 9) | st.none(), st.integers(0, 6))
def test_bounds_are_those_of_a_list(first: int | None, last: int | None, total: int) -> None:
    shown = "" if first is None else str(first), "" if last is None else str(last)
    path = source_path(f"a.jsonl@[{':'.join(shown)}]")
    assert (path.files, path.first, path.last) == ("a.jsonl", first, last)
    assert list(path.rows_of(total)) == list(range(total))[first:last]


@pytest.mark.parametrize(
    "bad", ["a.jsonl@[]", "a.jsonl@[3]", "a.jsonl@[a:b]", "a.jsonl@[1:2:3]", "a.jsonl@[1.5:]"]
)
def test_what_is_no_slice_is_refused(bad: str) -> None:
    with pytest.raises(DataError, match=r"is no slice; write path@\[first:last\]"):
        read_source(Source(path=bad))


def test_a_large_file_is_not_read_whole_for_a_check(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("data/0.jsonl", jsonl(range(2000)))
    store.write("data/1.parquet", parquet(range(2000, 3000)))
    seen = first_rows(Source(path=store.url_of("data")), 20, 1000)
    assert len(seen.usable) == 20
    assert not seen.whole
    assert 2900 <= seen.total <= 3100
    seen = first_rows(Source(path=store.url_of("data/0.jsonl@[-100:]")), 20, 1000)
    assert len(seen.usable) == 20
    assert not seen.whole


def test_a_file_added_to_a_folder_changed_or_removed_is_named(root: str) -> None:
    store = Store(root)
    source = Source(name="s", path=store.url_of("data"))
    store.write("data/a.jsonl", jsonl(range(3)))
    one = printed(source)
    assert one.sha256 == printed(Source(path=store.url_of("data/a.jsonl"))).sha256
    store.write("data/c.jsonl", jsonl(range(3, 5)))
    two = printed(source)
    [said] = source_changes({"s": one}, {"s": two})
    assert said.endswith("3 -> 5 rows, 3 -> 5 of them usable: new file c.jsonl")
    assert SourceFingerprint.model_validate(two.model_dump()) == two
    assert size_and_hash(source, SIZE) == (two.size, two.sha256)
    assert size_and_hash(source, 10) == (two.size, "")
    store.write("data/c.jsonl", jsonl(range(5, 7)))
    [said] = source_changes({"s": two}, {"s": printed(source)})
    assert said.endswith(": c.jsonl changed")
    store.remove("data/a.jsonl")
    [said] = source_changes({"s": two}, {"s": printed(source)})
    assert "a.jsonl is no longer there, c.jsonl changed" in said


def test_a_folder_that_moved_is_no_change_and_another_slice_is_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for folder in ("here", "there"):
        for name in ("a", "b"):
            store.write(f"{folder}/{name}.jsonl", jsonl(range(3)))
    here, there = (printed(Source(path=store.url_of(folder))) for folder in ("here", "there"))
    assert source_changes({"s": here}, {"s": there}) == []
    cut = printed(Source(path=store.url_of("here") + "@[:5]"))
    [said] = source_changes({"s": here}, {"s": cut})
    assert "the file is the same" in said
    assert "6 -> 5 rows" in said


def test_paths_that_name_no_files_are_refused_with_a_remedy(root: str) -> None:
    store = Store(root)
    store.write("data/notes.md", b"")
    saved(store, "torn", [range(3)])
    store.write("torn/data-00000-of-00001.arrow", arrow(range(3))[:200])
    saved(store, "unlisted", [range(3)])
    store.write("unlisted/state.json", b"{}")
    url = store.url_of
    for path, reason in {
        "data": r"holds no file that ends in \.jsonl or \.parquet; name the folder",
        "data/*.jsonl": r"no file that ends in .* matches; correct the source's path",
        "none": r"no such file or folder; correct the source's path",
        "none/*.jsonl": r"no file that ends in .* matches",
        "torn": r"data-00000-of-00001\.arrow: not a whole Arrow file: .*; write it again",
        "unlisted": r"its state\.json lists no _data_files; save the data set again",
    }.items():
        with pytest.raises(DataError, match=reason):
            read_source(Source(path=url(path)))


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.json.zst", "b.parquet.zip"])
def test_a_compressed_file_is_not_left_out_in_silence(root: str, name: str) -> None:
    store = Store(root)
    store.write("data/a.jsonl", jsonl(range(2)))
    store.write(f"data/{name}", b"packed")
    for path in ("data", "data/*"):
        with pytest.raises(DataError, match=f"{name} is compressed, and .* not read; unpack it"):
            read_source(Source(path=store.url_of(path)))
    assert prompts_of(Source(path=store.url_of("data/*.jsonl"))) == [0, 1]  # the second remedy


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_check_reads_a_first_row_whole_however_large_it_is(tmp_path: Path, at: int) -> None:
    """Cut at the end of what a check reads, it was taken for a row that is not JSON."""
    large = json.dumps({"prompt": "0+1=", "label": "1", "metadata": {"x": "y" * 10_000}}).encode() + b"\n"
    (tmp_path / "set.jsonl").write_bytes(jsonl(range(1, 1 + at)) + large + jsonl(range(1 + at, 4)))
    seen = first_rows(Source(path=str(tmp_path / "set.jsonl")), 1000, 100)
    assert seen.refused == []
    assert (len(seen.usable), seen.whole) == ((at, False) if at else (4, True))
    (tmp_path / "set.jsonl").write_bytes(large.rstrip())
    seen = first_rows(Source(path=str(tmp_path / "set.jsonl")), 1000, 100)
    assert (len(seen.usable), seen.total, seen.whole) == (1, 1, True)


def test_what_lies_at_a_path_is_seen_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(range(2)))
    there = ("a.jsonl", "*.jsonl", "a.jsonl@[:1]", "", "*.jsonl@[1:]")
    assert not any(is_absent(str(tmp_path / path)) for path in there)
    assert all(is_absent(str(tmp_path / path)) for path in ("b.jsonl", "*.parquet", "b.jsonl@[:1]"))
    assert not is_absent("s3://bucket/none.jsonl")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_of_an_object_store_are_read_by_their_numbers(s3_bucket: str, name: str) -> None:
    write = jsonl if name.endswith(".jsonl") else parquet
    Store(s3_bucket).write(f"by-number/{name}", write(range(40)))
    rows = AddressedRows(Source(path=f"{s3_bucket}/by-number/{name}@[5:]"))
    assert len(rows) == 35
    found = rows.read([30, 0, 7, 0])
    assert [item.row for item in found] == [35, 5, 12, 5]
    assert [item.prompt for item in found if isinstance(item, PromptRow)] == [
        "35+1=",
        "5+1=",
        "12+1=",
        "5+1=",
    ]
