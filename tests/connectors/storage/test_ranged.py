"""Tables read by byte ranges: the same rows, few bytes, and each kind of broken file by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.ranged import RangedTables, among
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError
from tests.support.stored_samples import drawn_group, sample_of

LONG = 4000  # tokens of a sample
NAME = "rollouts/part-a.parquet"


class Counted(Store):
    """A store that counts the bytes that are asked for."""

    asked = 0

    def ranges(self, wanted):  # type: ignore[no-untyped-def]
        found = super().ranges(wanted)
        self.asked += sum(map(len, found))
        return found


def pieces() -> list[pa.Table]:
    """A table a group, each a row group."""
    return [
        schema.to_table(
            [sample_of(drawn_group(number), index, "x" * LONG, LONG) for index in range(3)], "rollouts"
        )
        for number in range(4)
    ]


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Counted:
    return Counted(str(tmp_path) if request.param == "disk" else f"memory://ranged{tmp_path}")


@pytest.fixture
def entry(store: Counted) -> FileEntry:
    return store.write_pieces(NAME, pieces, "rollouts")


def test_columns_and_row_groups_are_those_of_the_whole_file(store: Counted, entry: FileEntry) -> None:
    columns = ["sample_id", "tokens", "policy_versions", "timings"]
    whole = store.read_table(NAME, "rollouts", entry, columns)
    assert RangedTables(store).read([entry], "rollouts", columns).equals(whole)
    found = [
        (number, table.num_rows)
        for _, number, table in RangedTables(store).groups([entry], "rollouts", columns)
    ]
    assert found == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_narrow_column_costs_a_small_part_of_the_file(store: Counted, entry: FileEntry) -> None:
    RangedTables(store).read([entry], "rollouts", ["sample_id"])
    footer = store.asked
    assert footer < entry.size
    store.asked = 0
    tables = RangedTables(store)
    tables.read([entry], "rollouts", ["sample_id"])
    first = store.asked
    tables.read([entry], "rollouts", ["sample_id"])
    assert store.asked - first < 2000  # the footer is kept, so that only the column is read


def test_statistics_leave_row_groups_out(store: Counted, entry: FileEntry) -> None:
    keep = among("group_id", ["g2"])
    found = [number for _, number, _ in RangedTables(store).groups([entry], "rollouts", ["group_id"], keep)]
    assert found == [2]


def shortened(data: bytes) -> bytes:
    return data[:-100]


def lengthened(data: bytes) -> bytes:
    return data + b"\0"


def page_changed(data: bytes) -> bytes:
    return data[:300] + bytes([data[300] ^ 1]) + data[301:]


def zeros(data: bytes) -> bytes:
    return bytes(len(data))


def footer_changed(data: bytes) -> bytes:
    return data[:-8] + (1 << 30).to_bytes(4, "little") + data[-4:]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "shortened": (shortened, "shorter than"),
    "lengthened": (lengthened, "longer than"),
    "a page changed": (page_changed, "not a whole Parquet file"),
    "zeros": (zeros, "does not end as one"),
    "a footer of another length": (footer_changed, "footer is longer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_and_the_others_are_read(store: Counted, entry: FileEntry, case: str) -> None:
    change, reason = BROKEN[case]
    other = store.write_pieces("rollouts/part-b.parquet", pieces, "rollouts").model_copy(
        update={"sha256": "other"}
    )
    store.write(NAME, change(store.read(NAME)))
    columns = schema.schema("rollouts").names
    with pytest.raises(CorruptFileError, match=reason) as raised:
        RangedTables(store).read([entry], "rollouts", columns)
    assert raised.value.where == store.url_of(NAME)
    failed: list[StorageError] = []
    found = RangedTables(store).read([entry, other], "rollouts", columns, failed=failed.append)
    assert found.num_rows >= 12
    assert {error.where for error in failed} == {store.url_of(NAME)}


def test_a_missing_file_is_named_and_the_others_are_read(store: Counted, entry: FileEntry) -> None:
    gone = entry.model_copy(update={"path": "rollouts/gone.parquet", "sha256": "gone"})
    with pytest.raises(MissingFileError, match="gone"):
        RangedTables(store).read([gone], "rollouts", ["sample_id"])
    failed: list[StorageError] = []
    found = RangedTables(store).read([gone, entry], "rollouts", ["sample_id"], failed=failed.append)
    assert (found.num_rows, len(failed)) == (12, 1)


def test_rows_and_kind_are_compared_with_the_entry(store: Counted, entry: FileEntry) -> None:
    with pytest.raises(CorruptFileError, match="holds 12 rows, what committed it says 13"):
        RangedTables(store).read([entry.model_copy(update={"rows": 13})], "rollouts", ["sample_id"])
    with pytest.raises(CorruptFileError, match="columns of rewards"):
        RangedTables(store).read([entry], "rewards", ["sample_id"])


def test_no_path_leads_out_of_the_store(store: Counted, entry: FileEntry) -> None:
    with pytest.raises(StorageError, match="leads out"):
        store.ranges([("../x", 0, 1)])
