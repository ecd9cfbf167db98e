"""Parts that are read as they land: what is asked for is what was stored, whether it was read before or not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.connectors.storage.parts import write_part
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError, MissingFileError
from millrace.tasks.batching import row_sources
from millrace.tasks.batching.row_sources import LandedParts
from millrace.tasks.stream import Stream
from tests.support.stored_samples import drawn_group, sample_of


def stored(store: Store, number: int) -> tuple[str, pa.Table]:
    table = schema.to_table([sample_of(drawn_group(number), 0, "2", 40)], "rollouts")
    return write_part(store, "rollouts", table, "rollouts").path, table


async def followed(landed: LandedParts, paths: list[str]) -> None:
    """Have parts read that land one after the other, until the filter settles."""
    stream = Stream(4)
    following = asyncio.create_task(landed.follow(stream))
    for path in paths:
        await stream.land("rollouts", path)
        await asyncio.sleep(0.05)
    await stream.settle()
    await asyncio.wait_for(following, 10)


# the first is read while there is any room
@pytest.mark.parametrize(("kept_bytes", "fit"), [(row_sources.PART_BYTES, 3), (1, 1), (0, 0)])
async def test_a_part_is_what_was_stored_and_those_that_fit_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, fit: int
) -> None:
    monkeypatch.setattr(row_sources, "PART_BYTES", kept_bytes)
    store = Store(str(tmp_path))
    parts = dict(stored(store, number) for number in range(3))
    landed = LandedParts(store)
    await followed(landed, list(parts))
    for path, table in parts.items():
        assert landed.read(path).equals(table)
        assert landed.read(path, ["sample_id"]).equals(table.select(["sample_id"]))
    for path in parts:
        (tmp_path / path).unlink()
    for path in list(parts)[:fit]:
        assert landed.read(path).equals(parts[path])
    for path in list(parts)[fit:]:
        with pytest.raises(MissingFileError):
            landed.read(path)
    landed.forget()
    with pytest.raises(MissingFileError):
        landed.read(next(iter(parts)))


async def test_a_part_that_cannot_be_read_is_the_error_of_whoever_asks_for_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    whole, broken, gone = (stored(store, number)[0] for number in range(3))
    (tmp_path / broken).write_bytes(b"PAR1")
    (tmp_path / gone).unlink()
    landed = LandedParts(store)
    await followed(landed, [broken, gone, whole])
    with pytest.raises(CorruptFileError, match=broken):
        landed.read(broken)
    with pytest.raises(MissingFileError, match=gone):
        landed.read(gone)
    (tmp_path / whole).unlink()
    assert landed.read(whole).num_rows == 1
