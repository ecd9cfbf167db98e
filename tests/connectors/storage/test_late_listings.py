"""A store whose listings are late: what is decided by a name is decided right. Every listing of the product has a row."""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from millrace.connectors.storage.changes import CHANGES
from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.lease import Lease, PassedLease, take_over
from millrace.connectors.storage.parts import (
    list_notes,
    list_parts,
    replace_attempt,
    take_over_parts,
    write_part,
)
from millrace.connectors.storage.run_folder import DRAWN, RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.contracts.sample import ScoredSample
from millrace.core.errors import LeaseHeldError
from tests.support.late_s3 import Odds, late_s3
from tests.support.passing_fence import Passing
from tests.support.stored_samples import drawn_group, sample_of

PACKAGE = Path(__file__).parents[3] / "src" / "millrace"


@pytest.fixture(params=["hidden", pytest.param("stale", marks=pytest.mark.slow)])
def late(request: pytest.FixtureRequest, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A root in a bucket, whose listings lack what is new, or are what they were."""
    with late_s3(os.environ["AWS_ENDPOINT_URL"], Odds(**{request.param: 1.0})) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield f"{s3_bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def memory() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "disk" else f"memory://{uuid.uuid4().hex}"


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
    (note,) = list_notes(store)
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
    assert take_over(folder) == 0
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


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ("Content-Length: 10", b"half"),
        ("Transfer-Encoding: chunked", b"a\r\nhalf"),
        ("Content-Length: 10", b""),
    ],
    ids=["cut", "cut chunk", "empty"],
)
def test_the_failing_store_keeps_nothing_of_an_object_whose_sender_dies_amid_it(
    s3_bucket: str, headers: str, body: bytes
) -> None:
    name, odds = uuid.uuid4().hex, Odds()
    with late_s3(os.environ["AWS_ENDPOINT_URL"], odds) as endpoint:
        address = urlsplit(endpoint)
        assert address.hostname
        assert address.port
        with socket.create_connection((address.hostname, address.port)) as sender:
            sender.sendall(f"PUT /bucket/{name} HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode() + body)
            sender.shutdown(socket.SHUT_WR)
            while sender.recv(1024):  # until the proxy has hung up
                continue
    assert not Store(s3_bucket).exists(name)


# Which parts count after a driver was replaced, where each listing shows less than there is. A part that is hidden is one that is
# written after the takeover: nothing else tells the two apart.


def samples(store: Store, *names: str) -> str:
    rows = [sample_of(drawn_group(0), 0, "2", sample_id=name) for name in names]
    return write_part(store, "rollouts", schema.to_table(rows, "rollouts"), "rollouts").path


def scores(store: Store, *names: str) -> str:
    rows = [
        ScoredSample(
            sample_id=name,
            group_id="g0",
            reward=1.0,
            reward_parts=[],
            scoring="scored",
            reason=None,
            scoring_s=0.0,
        )
        for name in names
    ]
    return write_part(store, "rewards", schema.to_table(rows, "rewards"), "rewards").path


def driven(root: str) -> RunFolder:
    """The run's folder, taken by a new driver that knows no more than storage shows."""
    CHANGES.forget()
    folder = RunFolder(root, "a")
    folder.store.fence = Lease.take(folder.store)
    CHANGES.forget()
    return folder


def once_driven(folder: RunFolder) -> Store:
    """The first iteration as a driver of before sees it, that is amid a write."""
    store = folder.iteration(0)
    assert store.fence
    store.fence = Passing(store.fence.token)
    return store


def given_up(folder: RunFolder) -> None:
    """The driver ends."""
    assert isinstance(folder.store.fence, Lease)
    folder.store.fence.release()


def test_parts_that_a_record_names_count_though_no_listing_shows_them(late: str) -> None:
    first = driven(late)
    part, score = samples(first.iteration(0), "s"), scores(first.iteration(0), "s")
    first.iteration(0).write_json(DRAWN, {})
    for task, path in (("rollout", part), ("reward", score)):
        result = json.dumps({"files": [{"path": path}]})
        first.iteration(0).write_sealed(record_path(task), {"result": result})
    given_up(first)
    second = driven(late)
    assert take_over(second) == 0
    assert list_parts(second.iteration(0), "rollouts") == [part]
    assert list_parts(second.iteration(0), "rewards") == [score]


def test_a_score_counts_with_the_sample_that_it_is_of(memory: str) -> None:
    first = driven(memory)
    shown = samples(first.iteration(0), "shown")
    with_it, without = scores(first.iteration(0), "shown"), scores(first.iteration(0), "hidden")
    given_up(first)
    second = driven(memory)
    take_over(second)
    samples(once_driven(first), "hidden")
    assert list_parts(second.iteration(0), "rollouts") == [shown]
    assert list_parts(second.iteration(0), "rewards") == [with_it]
    assert second.iteration(0).exists(without)


def test_a_part_of_an_attempt_that_was_replaced_never_counts_once_another_made_its_samples(
    root: str,
) -> None:
    first = driven(root)
    store = first.iteration(0)
    store.attempt = 1
    reported = samples(store, "one")
    replace_attempt(store, 1, 1, {"rollouts": [reported]})
    store.attempt = 2
    again = samples(store, "two", "three")
    store.attempt = 1
    samples(store, "two")
    assert list_parts(first.iteration(0), "rollouts") == sorted([reported, again])
    given_up(first)
    second = driven(root)
    take_over(second)
    assert list_parts(second.iteration(0), "rollouts") == sorted([reported, again])


def test_notes_of_earlier_drivers_are_asked_for_by_name(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"{s3_bucket}/{uuid.uuid4().hex}"
    first = driven(root)
    store = first.iteration(0)
    store.write_json(DRAWN, {})
    store.attempt = 1
    reported = samples(store, "one")
    replace_attempt(store, 1, 1, {"rollouts": [reported]})
    stray = samples(store, "two")
    given_up(first)
    second = driven(root)
    take_over(second)
    late = samples(once_driven(first), "three")
    given_up(second)
    with late_s3(os.environ["AWS_ENDPOINT_URL"], Odds(hidden=1.0, named="takeover-|replaced-")) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        third = driven(root)
        take_over(third)
        counted = list_parts(third.iteration(0), "rollouts")
    assert counted == [reported]
    assert {stray, late}.isdisjoint(counted)


LISTINGS = re.compile(
    r"\.(?:list|folders|download_dir)\(|\b(?:list_parts|list_notes)\(|to_thread\(list_parts\b"
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
    "connectors/trainers/checkpoint/folders.py": "names the files by the checkpoint's marker",
    "connectors/engines/process.py": "a folder of weights without one of its files is not loaded: the engine names it",
    "connectors/storage/checkpoint_files.py": "a checkpoint more stays, or an older one is gone on from: its steps are made again",
    "connectors/storage/iteration_files.py": BY_NAME,
    "connectors/storage/kernel_cache.py": "kernels that are not found are compiled, and stored once more",
    "connectors/storage/lease.py": BY_NAME,
    "connectors/storage/parts.py": "what this process wrote counts, and what the note of its takeover names",
    "connectors/storage/run_folder.py": BY_NAME,
    "connectors/storage/store.py": LOUD,
    "flows/preflight/check_run.py": BY_NAME,
    "flows/quickstart.py": OWN,
    "flows/commands/runs.py": SHOWN,
    "flows/commands/show.py": SHOWN,
    "flows/commands/discard.py": LOUD,
    "flows/driver/ending.py": SHOWN,
    "flows/driver/stored_run.py": "a missing run.json is named either way",
    "flows/commands/named_files.py": SHOWN,
    "flows/commands/replay.py": LOUD,
    "flows/commands/sql.py": SHOWN,
    "flows/commands/verify.py": SHOWN,
    "flows/commands/weights_after.py": "an export that is not found is made again from a checkpoint and the stored batches",
    "flows/viewer/answers.py": SHOWN,
    "flows/viewer/stored.py": SHOWN,
    "flows/viewer/tokens.py": "a tokenizer that is not found is named, and the ids are shown",
    "tasks/context.py": OWN,
    "tasks/reward.py": OWN,
    "tasks/runtime/weights_folder.py": "a folder of weights stays for another version",
    "tasks/batching/credited.py": "a scored sample without a row is an error",
    "tasks/batching/judged_groups.py": OWN,
    "tasks/shards/attempts.py": REPORTED,
    "tasks/shards/driver.py": REPORTED,
    "tasks/generation/stored_rollouts.py": OWN,
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
