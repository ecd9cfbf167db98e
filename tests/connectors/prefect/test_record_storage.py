"""Prefect's handle on the storage root: what servers' databases and run folders of earlier releases rely on."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest
from prefect import task

from millrace.connectors.prefect.record_storage import PLAIN, KeptAt, RecordStorage, kept_at
from millrace.core.errors import CorruptFileError, MissingFileError

RECORD = b'{"metadata": {}, "result": "{}"}'
READ = json.dumps({"metadata": {"serializer": PLAIN.model_dump()}, "result": "{}"}).encode()


def test_servers_know_the_block_type_for_good() -> None:
    assert RecordStorage.get_block_type_slug() == "millrace-storage-root"
    checksum = "sha256:9874afa5fa9b3eed5de7328d048c05b22e6357c6b4888f0580309566e548543a"
    assert RecordStorage._calculate_schema_checksum() == checksum


async def test_records_are_files_under_the_root(tmp_path: Path) -> None:
    storage = RecordStorage(root=str(tmp_path))
    await storage.write_path("a/iterations/000000/results/rollout.json", RECORD)
    assert await storage.read_path("a/iterations/000000/results/rollout.json") == READ
    with pytest.raises(MissingFileError, match="reward"):
        await storage.read_path("a/iterations/000000/results/reward.json")


async def test_a_record_that_changed_is_another_ones_or_has_no_hash_is_named(
    tmp_path: Path,
) -> None:
    storage = RecordStorage(root=str(tmp_path))
    path = "a/iterations/000000/results/rollout.json"
    await storage.write_path(path, RECORD)
    file = tmp_path / path
    whole = file.read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        file.write_bytes(changed)
        try:
            assert await storage.read_path(path) == READ
        except CorruptFileError:
            continue
    other = tmp_path / "a/iterations/000001/results/rollout.json"
    other.parent.mkdir(parents=True)
    other.write_bytes(whole)
    with pytest.raises(CorruptFileError, match=r"was written as iterations/000000/results/rollout\.json"):
        await storage.read_path("a/iterations/000001/results/rollout.json")
    other.write_bytes(RECORD)
    with pytest.raises(CorruptFileError, match="lacks the hash that it was written with"):
        await storage.read_path("a/iterations/000001/results/rollout.json")


def test_an_exception_is_a_text_and_what_is_no_json_is_no_record() -> None:
    """Prefect stores a failed task's exception, and warns if it cannot."""
    assert PLAIN.loads(PLAIN.dumps(ValueError("bad"))) == "bad"
    with pytest.raises(TypeError, match="set has no place in a record"):
        PLAIN.dumps({"a": {1}})


def test_a_task_is_kept_at_its_path_and_keeps_its_own_options(tmp_path: Path) -> None:
    @task(name="rollout", retries=2)
    async def rollout(number: int) -> dict[str, int]:
        return {"number": number}

    storage = RecordStorage(root=str(tmp_path))
    storage._block_document_id = uuid4()  # as if a server had saved it
    kept = kept_at("a/results/rollout.json", rollout, storage)
    assert kept.cache_policy == KeptAt(path="a/results/rollout.json")
    assert (kept.name, kept.retries, kept.persist_result) == ("rollout", 2, True)
    assert not kept.cache_result_in_memory
