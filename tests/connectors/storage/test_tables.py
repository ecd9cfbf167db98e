"""Tables: written as the schema says, read back equal, and never read wrong."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.connectors.storage import tables
from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.parts import list_parts, read_parts, write_part
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError, MissingFileError


def rewards(first: int, count: int) -> pa.Table:
    rows = [
        {
            "sample_id": f"s{number:05d}",
            "group_id": f"g{number // 4}",
            "reward": number / 7,
            "reward_parts": [("exact", 1.0), ("length", -0.5)],
            "scoring": "scored",
            "reason": None,
            "scoring_s": 0.001,
        }
        for number in range(first, first + count)
    ]
    return pa.Table.from_pylist(rows, schema=schema.SCHEMAS["rewards"])


def rollouts(samples: int, length: int) -> pa.Table:
    chance = random.Random(0)
    rows: list[dict[str, Any]] = [
        {
            **{
                name: f"{name}-{number}"
                for name in ("sample_id", "group_id", "prompt_id", "source", "prompt")
            },
            "iteration": 0,
            "index": number,
            "label": None,
            "metadata": None,
            "tokens": [chance.randrange(100_000) for _ in range(length)],
            "response_length": length,
            "response": "x" * length,
            "loss_mask": [1] * length,
            "rollout_logprobs": [-chance.expovariate(1) for _ in range(length)],
            "policy_versions": [{"first_token": 0, "version": 3}],
            "engine_id": "engine-0",
            "seed": number,
            "turns": 1,
            "status": "completed",
            "reason": None,
            "timings": [("generate_s", 1.5)],
        }
        for number in range(samples)
    ]
    return pa.Table.from_pylist(rows, schema=schema.SCHEMAS["rollouts"])


def test_a_table_is_read_back_equal_with_kind_and_version(root: str) -> None:
    store, table = Store(root), rollouts(5, 40)
    entry = store.write_table("rollouts/a.parquet", table, "rollouts")
    assert (entry.rows, entry.table) == (5, "rollouts")
    read = store.read_table("rollouts/a.parquet", "rollouts", entry)
    assert read.equals(table)
    assert read.schema.metadata == {b"millrace.table": b"rollouts", b"millrace.version": b"1"}
    assert store.read_table("rollouts/a.parquet").equals(table), "the kind need not be known"
    assert store.read_table("rollouts/a.parquet", "rollouts", columns=["seed"]).to_pydict() == {
        "seed": [0, 1, 2, 3, 4]
    }
    assert store.entry("rollouts/a.parquet") == entry


def test_log_probabilities_are_byte_stream_split_and_all_is_zstd_without_dictionaries() -> None:
    file = pq.ParquetFile(pa.BufferReader(tables.encode(rollouts(3, 50), "rollouts")))
    columns = {
        (column := file.metadata.row_group(0).column(number)).path_in_schema: column
        for number in range(file.metadata.num_columns)
    }
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in columns["rollout_logprobs.list.element"].encodings
    assert not any("DICTIONARY" in name for column in columns.values() for name in column.encodings)


def test_an_empty_table_of_every_kind_is_read_back(root: str) -> None:
    store = Store(root)
    for kind in schema.SCHEMAS:
        store.write_table(f"{kind}.parquet", schema.schema(kind).empty_table(), kind)
        assert store.read_table(f"{kind}.parquet", kind).num_rows == 0


def test_special_floats_are_kept_to_the_bit(root: str) -> None:
    table = rewards(0, 4).set_column(
        2, schema.SCHEMAS["rewards"].field("reward"), pa.array([-0.0, math.inf, math.nan, None])
    )
    Store(root).write_table("r.parquet", table, "rewards")
    values = Store(root).read_table("r.parquet", "rewards").column("reward").to_pylist()
    assert math.copysign(1, values[0]) == -1
    assert values[1] == math.inf
    assert math.isnan(values[2])
    assert values[3] is None


def test_a_table_that_does_not_fit_its_schema_is_not_written(root: str) -> None:
    store = Store(root)
    good = rewards(0, 2)
    with pytest.raises(KeyError):
        store.write_table("r.parquet", good.drop_columns(["scoring"]), "rewards")
    with pytest.raises(pa.ArrowInvalid):
        store.write_table("r.parquet", good.set_column(2, "reward", pa.array(["a", "b"])), "rewards")
    with pytest.raises(ValueError, match="null"):
        store.write_table("r.parquet", good.set_column(4, "scoring", pa.array(["scored", None])), "rewards")
    assert not store.exists("r.parquet")


def test_another_kind_another_version_and_foreign_files_are_named_with_a_remedy(root: str) -> None:
    store, table = Store(root), rewards(0, 2)
    store.write_table("r.parquet", table, "rewards")
    with pytest.raises(
        CorruptFileError, match=r"r\.parquet: holds rewards, wanted verdicts; restore the file"
    ):
        store.read_table("r.parquet", "verdicts")
    for metadata, said in (
        (
            {"millrace.table": "rewards", "millrace.version": "99"},
            "schema version 99, wanted 1; read it with the millrace",
        ),
        ({"millrace.table": "rewards"}, "schema version none"),
        ({"millrace.table": "other"}, "holds other, wanted rewards"),
        ({}, "holds no table of millrace"),
    ):
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata(metadata), sink)
        store.write("x.parquet", bytes(sink.getvalue()))
        with pytest.raises(CorruptFileError, match=rf"x\.parquet: .*{said}"):
            store.read_table("x.parquet", "rewards")
    other = table.set_column(2, "reward", table.column("reward").cast(pa.float32()))
    sink = pa.BufferOutputStream()
    pq.write_table(other.replace_schema_metadata(schema.schema("rewards").metadata), sink)
    store.write("x.parquet", bytes(sink.getvalue()))
    with pytest.raises(
        CorruptFileError, match=r"x\.parquet: rewards: columns \['reward'\] are not as the schema"
    ):
        store.read_table("x.parquet", "rewards")


def test_a_missing_table_is_named(root: str) -> None:
    with pytest.raises(MissingFileError, match=r"none\.parquet: no such file"):
        Store(root).read_table("none.parquet", "rewards")


def test_a_table_unlike_its_entry_is_named(root: str) -> None:
    store = Store(root)
    entry = store.write_table("r.parquet", rewards(0, 4), "rewards")
    wrong = entry.model_copy(update={"rows": 5})
    with pytest.raises(CorruptFileError, match=r"r\.parquet: holds 4 rows, what committed it says 5"):
        store.read_table("r.parquet", "rewards", wrong)
    store.write_table("r.parquet", rewards(1, 4), "rewards")
    with pytest.raises(CorruptFileError, match=r"r\.parquet: its (sha256|size) is"):
        store.read_table("r.parquet", "rewards", entry)


def test_truncated_at_any_length_a_table_is_a_named_error() -> None:
    data = tables.encode(rewards(0, 20), "rewards")
    for length in [*range(0, len(data), 97), len(data) - 1]:
        with pytest.raises(CorruptFileError, match="r: not a whole Parquet file|r: holds|r: rewards"):
            tables.decode(data[:length], "rewards", "r")


def flipped(data: bytes, times: int) -> Iterator[bytes]:
    chance = random.Random(1)
    for _ in range(times):
        broken = bytearray(data)
        broken[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        yield bytes(broken)


def test_with_any_bit_flipped_a_table_is_read_or_a_named_error() -> None:
    """Page checksums catch what lies in pages; headers are left to the hash in the manifest or in the part's name."""
    data, caught = tables.encode(rollouts(4, 60), "rollouts"), 0
    for broken in flipped(data, 600):
        try:
            tables.decode(broken, "rollouts", "r")
        except CorruptFileError:
            caught += 1
    assert caught > 300


def test_a_part_with_any_bit_flipped_is_a_named_error(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    entry = write_part(store, "rollouts", rollouts(4, 60), "rollouts")
    for broken in flipped(store.read(entry.path), 100):
        store.write(entry.path, broken)
        for read in (store.read_table, store.entry):
            with pytest.raises(CorruptFileError, match=re.escape(entry.path)):
                read(entry.path)


def test_parts_are_gathered_whatever_their_number_and_a_restart_adds_to_them(root: str) -> None:
    store = Store(root)
    assert read_parts(store, "rewards", "rewards").num_rows == 0
    assert read_parts(store, "rewards", "rewards", columns=["reward"]).schema.names == ["reward"]
    entries: list[FileEntry] = [
        write_part(store, "rewards", rewards(10 * number, 10), "rewards") for number in range(3)
    ]
    assert sorted(entry.path for entry in entries) == list_parts(store, "rewards")
    again = Store(root)
    write_part(again, "rewards", rewards(30, 5), "rewards")
    found = read_parts(again, "rewards", "rewards")
    assert sorted(found.column("sample_id").to_pylist()) == [f"s{number:05d}" for number in range(35)]
    assert found.schema.equals(schema.SCHEMAS["rewards"])
    assert read_parts(again, "rewards", "rewards", columns=["reward"]).num_rows == 35


def test_a_broken_part_is_named_or_removed_when_told_so(root: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(root)
    write_part(store, "rewards", rewards(0, 10), "rewards")
    whole = store.read(list_parts(store, "rewards")[0])
    broken = f"rewards/part-000000-{'0' * 32}.{'0' * 16}.parquet"
    store.write(broken, whole[: len(whole) // 2])
    with pytest.raises(CorruptFileError, match=f"{broken}: its content does not have the hash in its name"):
        read_parts(store, "rewards", "rewards")
    assert read_parts(store, "rewards", "rewards", ignore_incomplete=True).num_rows == 10
    assert "removing a broken part" in caplog.text
    assert broken in caplog.text
    assert len(list_parts(store, "rewards")) == 1
    assert read_parts(store, "rewards", "rewards").num_rows == 10


def test_copies_of_a_part_and_files_with_other_names_count_for_nothing(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(root)
    entry = write_part(store, "rewards", rewards(0, 10), "rewards")
    data, hashed = store.read(entry.path), entry.sha256[:16]
    for name in (
        f"part-000000-{'f' * 32}.{hashed}.parquet",
        "part-copy.parquet",
        f"copy of {entry.path[8:]}",
    ):
        store.write(f"rewards/{name}", data)
    assert read_parts(store, "rewards", "rewards").num_rows == 10
    assert "a copy of" in caplog.text
