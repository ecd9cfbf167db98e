"""A driver that lost its lease changes nothing any more, at whatever line it was stopped."""

from __future__ import annotations

import contextlib
import errno
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prefect.results import ResultStore

from millrace.connectors.host import local_files
from millrace.connectors.prefect.record_storage import RecordStorage
from millrace.connectors.storage import faults
from millrace.connectors.storage import lease as leases
from millrace.connectors.storage.files import move_file
from millrace.connectors.storage.lease import Lease, PassedLease, take_over
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.parts import list_notes, list_parts, read_parts, write_part
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.contracts.sample import ScoredSample
from millrace.core.errors import CorruptFileError, LeaseHeldError, StorageError
from tests.support.passing_fence import Passing
from tests.support.stored_samples import drawn_group, sample_of

TABLE = schema.schema("rewards").empty_table()


def move(store: Store) -> None:
    """Move a file that is there only meanwhile."""
    plain = Store(store.url)
    plain.write("moving", b"1")
    try:
        move_file(store, "moving", "moved")
    finally:
        plain.remove("moving")


CHANGES: dict[str, Callable[[Store, Path], object]] = {
    "write": lambda store, _: store.write("file", b"new"),
    "create": lambda store, _: store.create("another", b"new"),
    "remove": lambda store, _: store.remove("file"),
    "write_json": lambda store, _: store.write_json("file", {}),
    "write_sealed": lambda store, _: store.write_sealed("file", {}),
    "write_table": lambda store, _: store.write_table("file", TABLE, "rewards"),
    "write_pieces": lambda store, _: store.write_pieces("file", lambda: [TABLE], "rewards"),
    "upload_dir": lambda store, folder: store.upload_dir(str(folder), "uploaded"),
    "check_writable": lambda store, _: store.check_writable(),
}
READS = {
    *(
        "read",
        "read_json",
        "read_named",
        "read_table",
        "local_size",
        "sizes",
        "ranges",
        "blocks",
        "exists",
        "existing",
        "list",
        "folders",
        "entry",
        "entries",
        "verify",
    ),
    *("check", "read_sealed", "opened"),
    *("download_dir", "child", "url_of", "fs", "url", "real_url", "creates_once"),
    "sweep",  # files that nobody writes any more
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for a holder's sign of life, and no look at the lease that holds for a while."""
    monkeypatch.setenv("MILLRACE_LEASE_S", "0")
    monkeypatch.setattr(leases, "FRESH_S", 0.0)


def driven(root: str) -> Store:
    store = Store(root)
    store.fence = Lease.take(store)
    return store


def taken_over(store: Store) -> Store:
    """The store of a new driver on another host."""
    path = f"lease/{store.fence.token:06d}.json" if store.fence else ""
    plain = Store(store.url)
    claim = plain.read_json(path)
    plain.write_json(path, {**claim, "process": {**claim["process"], "boot": "another"}})
    return driven(store.url)


def test_every_method_of_a_store_reads_or_is_in_the_table() -> None:
    public = {name for name, _ in inspect.getmembers(Store) if not name.startswith("_")}
    assert public == READS | set(CHANGES)


@pytest.mark.parametrize("change", [*CHANGES.values(), lambda store, _: move(store)], ids=[*CHANGES, "move"])
def test_nothing_changes_by_a_driver_that_lost_its_lease_or_by_its_shards(
    root: str, change: Callable[[Store, Path], object], tmp_path: Path
) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "one").write_bytes(b"1")
    stale = Store(f"{root}/run")
    stale.write("file", b"old")
    stale = driven(stale.url)
    in_shard = Store(stale.url)
    assert stale.fence
    in_shard.fence = PassedLease(Store(stale.url), stale.fence.token)
    change(stale.child("below"), tmp_path / "local")
    change(in_shard.child("below too"), tmp_path / "local")
    new = taken_over(stale)
    before = {path: new.read(path) for path in new.list()}
    for store in (stale, stale.child("below"), in_shard, in_shard.child("below")):
        with pytest.raises(LeaseHeldError, match="taken over by process"):
            change(store, tmp_path / "local")
    assert {path: new.read(path) for path in new.list()} == before


async def test_a_record_of_a_driver_that_lost_its_lease_is_refused(tmp_path: Path) -> None:
    stale = driven(str(tmp_path / "a"))
    storage = RecordStorage(root=str(tmp_path))
    storage.drive_under(stale.fence, None)
    assert (
        ResultStore(result_storage=storage).result_storage is storage
    )  # Prefect makes no copy without the fence
    await storage.write_path("a/iterations/000000/results/rollout.json", b"{}")
    taken_over(stale)
    with pytest.raises(LeaseHeldError):
        await storage.write_path("a/iterations/000000/results/reward.json", b"{}")
    assert not (tmp_path / "a/iterations/000000/results/reward.json").exists()


@pytest.mark.parametrize("late", [False, True])
def test_a_lock_that_storage_fails_to_give_once_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Also if it was had already when its try failed."""
    own = Lease.take(Store(str(tmp_path)))
    hold, tries = local_files.shared_or_alone, []

    @contextlib.contextmanager
    def failing(*given: Any, **options: Any) -> Iterator[bool]:
        tries.append(given)
        fails = len(tries) == 1
        if fails and not late:
            raise OSError(errno.EIO, "injected")
        with hold(*given, **options) as locked:
            yield locked

    def once(verb: str, call: Callable[[], Any]) -> Callable[[], Any]:
        def faulty() -> Any:
            result = call()
            if late and verb == "write" and len(tries) == 1:
                raise OSError(errno.EIO, "injected")
            return result

        return faulty

    monkeypatch.setattr(local_files, "shared_or_alone", failing)
    monkeypatch.setattr(faults, "injected", once)
    with own.writing():
        assert len(tries) == 2


def test_on_a_disk_no_other_takes_the_lease_amid_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LOCK_PATIENCE_S", 0.2)
    stale = driven(str(tmp_path))
    assert stale.fence
    with stale.fence.writing(), pytest.raises(LeaseHeldError, match="amid a write.*kill -9"):
        taken_over(stale)
    assert taken_over(stale).fence is not None


@pytest.mark.parametrize("root", ["s3"], indirect=True)
@pytest.mark.parametrize("existed", [True, False])
def test_on_s3_a_write_stopped_after_its_look_at_the_lease_is_refused(
    root: str, existed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existed:
        Store(root).write("step.json", b"of an earlier attempt")
    stale = driven(root)
    look = stale.fence.check if stale.fence else None

    def look_and_stop() -> None:
        assert look
        look()
        monkeypatch.setattr(stale.fence, "check", look)
        taken_over(stale).write("step.json", b"of the successor")

    monkeypatch.setattr(stale.fence, "check", look_and_stop)
    with pytest.raises(LeaseHeldError):
        stale.write("step.json", b"of the stale driver")
    assert Store(root).read("step.json") == b"of the successor"


def rewards(*samples: str) -> pa.Table:
    rows = [
        ScoredSample(
            sample_id=name,
            group_id="g",
            reward=1.0,
            reward_parts=[],
            scoring="scored",
            reason=None,
            scoring_s=0.0,
        )
        for name in samples
    ]
    return schema.to_table(rows, "rewards")


def samples(*names: str) -> pa.Table:
    rows = [sample_of(drawn_group(0), 0, "2", sample_id=name) for name in names]
    return schema.to_table(rows, "rollouts")


def test_parts_that_land_after_a_takeover_do_not_count(root: str) -> None:
    """Three drivers: what the first one wrote before it was replaced counts for ever, what it wrote after never does."""
    folder = RunFolder(root, "a")
    folder.store.fence = Lease.take(folder.store)
    stale = folder.iteration(0)
    write_part(stale, "rollouts", samples("one", "two", "three"), "rollouts")
    kept = write_part(stale, "rewards", rewards("one"), "rewards").path
    stale.fence = Passing(1)
    for sample in ("two", "three"):
        folder.store = taken_over(folder.store)
        assert take_over(folder) == 0
        late = write_part(stale, "rewards", rewards(sample), "rewards").path
        new = folder.iteration(0)
        mine = write_part(new, "rewards", rewards(sample), "rewards").path
        assert late not in list_parts(new, "rewards")
        assert {kept, mine} <= set(list_parts(new, "rewards"))
        assert new.exists(late)
    assert read_parts(new, "rewards", "rewards")["sample_id"].to_pylist() == ["one", "two", "three"]


def test_a_broken_note_of_a_takeover_is_named_and_its_remedy_works(root: str) -> None:
    folder = RunFolder(root, "a")
    folder.store.fence = Lease.take(folder.store)
    part = write_part(folder.iteration(0), "rewards", rewards("one"), "rewards").path
    folder.store = taken_over(folder.store)
    take_over(folder)
    store = folder.iteration(0)
    (note,) = list_notes(store)
    for changed in (store.read(note).replace(b"parts", b"ports"), b"{}", b"[", b""):
        store.write(note, changed)
        with pytest.raises(CorruptFileError, match=f"{note}: .*remove it: then all parts count"):
            list_parts(store, "rewards")
    store.remove(note)
    assert list_parts(store, "rewards") == [part]


def test_of_two_manifests_of_an_iteration_the_first_stays(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = RunFolder(root, "a"), RunFolder(root, "a")
    files = [first.iteration(0).write("step.json", b"{}")]
    looked = second.manifest

    def look_before_the_other_commits(index: int) -> Manifest | None:
        monkeypatch.setattr(second, "manifest", looked)
        found = looked(index)
        first.commit_manifest(0, Manifest(iteration=0, files=files, tasks={"driver": 2}))
        return found

    monkeypatch.setattr(second, "manifest", look_before_the_other_commits)
    with pytest.raises(StorageError, match="committed with other files"):
        second.commit_manifest(0, Manifest(iteration=0, files=[], tasks={"driver": 1}))
    manifest = first.manifest(0)
    assert manifest
    assert (manifest.files, manifest.tasks) == (files, {"driver": 2})
