"""A store whose listings are late: what is decided by a name is decided right. Every listing of the product has a row."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.connectors.storage.changes import CHANGES
from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.lease import Lease, PassedLease
from millrace.connectors.storage.parts import list_parts, list_takeovers, take_over_parts, write_part
from millrace.connectors.storage.run_folder import DRAWN, RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.errors import LeaseHeldError
from tests.support.late_s3 import Odds, late_s3

PACKAGE = Path(__file__).parents[3] / "src" / "millrace"


@pytest.fixture(params=["hidden", "stale"])
def late(request: pytest.FixtureRequest, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A root in a bucket, whose listings lack what is new, or are what they were."""
    with late_s3(os.environ["AWS_ENDPOINT_URL"], Odds(**{request.param: 1.0})) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield f"{s3_bucket}/{uuid.uuid4().hex}"


def part_of(store: Store) -> str:
    return write_part(store, "rewards", schema.to_table([], "rewards"), "rewards").path


def test_what_a_process_wrote_and_removed_is_in_its_listings(late: str) -> None:
    store = Store(late)
    assert store.list() == []
    for name in ("a/x", "a/y", "b"):
        store.write(name, b"1")
    assert store.list() == ["a/x", "a/y", "b"]
    assert store.list("a") == ["a/x", "a/y"]
    assert store.folders() == ["a"]
    store.remove("a/x")
    assert store.list() == ["a/y", "b"]
    store.remove("a", recursive=True)
    assert store.list() == ["b"]
    store.write("a/x", b"2")
    assert store.list() == ["a/x", "b"]


def test_a_driver_keeps_its_lease_though_no_listing_shows_it_and_stops_where_another_took_it(
    late: str,
) -> None:
    store = Store(late)
    store.list("lease")
    first = Lease.take(Store(late))
    CHANGES.forget()
    first.renew()
    PassedLease(Store(late), first.token).check()
    with pytest.raises(LeaseHeldError):
        Lease.take(Store(late))
    first.release()
    CHANGES.forget()
    second = Lease.take(Store(late))
    assert second.token == first.token + 1
    CHANGES.forget()
    for lease in (first, PassedLease(Store(late), first.token)):
        with pytest.raises(LeaseHeldError, match="was taken over by"):
            lease.check()
    second.renew()


def test_parts_that_a_driver_found_when_it_took_over_count_though_a_later_listing_lacks_them(
    late: str,
) -> None:
    store = Store(late)
    found = part_of(store)
    take_over_parts(store, ["rewards"], token=2)
    (note,) = list_takeovers(store)
    CHANGES.forget()  # another process wrote the part
    CHANGES.wrote(f"{store.root}/{note}")
    assert list_parts(Store(late), "rewards") == [found]


def test_what_was_begun_is_taken_over_though_no_listing_shows_it(late: str) -> None:
    folder = RunFolder(late, "a")
    for index in range(3):
        folder.iteration(index).write_json(DRAWN, {})
    Lease.take(folder.store).release()
    CHANGES.forget()
    folder.store.fence = Lease.take(folder.store)
    assert folder.take_over() == 0
    assert [folder.iteration(index).exists("takeover-000002.json") for index in range(4)] == [True] * 3 + [
        False
    ]


def test_the_records_of_an_iteration_are_found_by_name(late: str) -> None:
    folder = RunFolder(late, "a")
    folder.iteration(0).list("results")
    for task in ("sample_prompts", "rollout"):
        folder.iteration(0).write_json(record_path(task), {})
    CHANGES.forget()
    assert IterationFiles(folder, 0).recorded_tasks() == ["sample_prompts", "rollout"]


LISTINGS = re.compile(
    r"\.(?:list|folders|download_dir)\(|\b(?:list_parts|list_takeovers)\(|to_thread\(list_parts\b"
    r"|numbers_of\([^)]*\"(?:iterations|checkpoints)\""
)
OWN = "its own process wrote what it asks for"
BY_NAME = "what the listing lacks is asked for by name"
SHOWN = "a command shows less, and says so again when it is asked again; nothing is decided"
REPORTED = (
    "parts count that shards report; what one wrote and did not report before its death is generated again"
)
LOUD = "a file that is missing is named, and nothing is done"
# What a listing does that lacks the newest names, by the module that asks for one.
ROWS = {
    "connectors/megatron/checkpoint/folders.py": "names the files by the checkpoint's marker",
    "connectors/sglang/process.py": "a folder of weights without one of its files is not loaded: the engine names it",
    "connectors/storage/checkpoint_files.py": "a checkpoint more stays, or an older one is gone on from: its steps are made again",
    "connectors/storage/iteration_files.py": BY_NAME,
    "connectors/storage/lease.py": BY_NAME,
    "connectors/storage/parts.py": "what this process wrote counts, and what the note of its takeover names",
    "connectors/storage/run_folder.py": BY_NAME,
    "connectors/storage/store.py": LOUD,
    "flows/preflight/check_run.py": BY_NAME,
    "flows/quickstart.py": OWN,
    "flows/tools/browse.py": SHOWN,
    "flows/tools/discard.py": LOUD,
    "flows/tools/ending.py": SHOWN,
    "flows/tools/evaluate.py": LOUD,
    "flows/tools/named_files.py": SHOWN,
    "flows/tools/replay.py": LOUD,
    "flows/tools/sql/query.py": SHOWN,
    "flows/tools/verify.py": SHOWN,
    "tasks/context.py": OWN,
    "tasks/reward.py": OWN,
    "tasks/runtime/weights_folder.py": "a folder of weights stays for another version",
    "tasks/samples/batch/credited.py": "a scored sample without a row is an error",
    "tasks/samples/judging.py": OWN,
    "tasks/shards/attempts.py": REPORTED,
    "tasks/shards/sharded.py": REPORTED,
    "tasks/stored_rollouts.py": OWN,
    "tasks/train_step.py": "a file that nothing names stays",
}


def test_every_listing_has_a_row() -> None:
    asks = {
        path.relative_to(PACKAGE).as_posix()
        for part in ("connectors", "core", "flows", "tasks")
        for path in sorted((PACKAGE / part).rglob("*.py"))
        if LISTINGS.search(path.read_text(encoding="utf-8"))
    }
    assert asks == set(ROWS)
