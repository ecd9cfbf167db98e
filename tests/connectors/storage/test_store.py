"""Store: what is written is there whole, on every kind of storage, and every failure is named."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem

from millrace.connectors.host.local_files import secret_file
from millrace.connectors.storage import faults
from millrace.connectors.storage.store import Store, split_url
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError


def test_what_is_written_is_read_listed_and_removed(root: str) -> None:
    store = Store(root)
    entry = store.write("a/b/one.bin", b"one")
    assert (entry.path, entry.size, entry.sha256) == ("a/b/one.bin", 3, hashlib.sha256(b"one").hexdigest())
    store.write("a/two.bin", b"")
    store.write("ab/three.bin", b"three")
    assert store.read("a/b/one.bin") == b"one"
    assert store.read("a/two.bin") == b""
    assert store.list() == ["a/b/one.bin", "a/two.bin", "ab/three.bin"]
    assert store.list("a") == ["a/b/one.bin", "a/two.bin"]
    assert store.folders() == ["a", "ab"]
    assert store.folders("a") == ["b"]
    assert store.list("none") == []
    assert store.folders("none") == []
    assert store.exists("a/two.bin")
    assert store.exists("a")
    assert not store.exists("a/none")
    store.remove("a/two.bin")
    store.remove("a/two.bin")
    store.remove("none", recursive=True)
    store.remove("a", recursive=True)
    assert store.list() == ["ab/three.bin"]


def test_a_file_is_replaced_whole(root: str) -> None:
    store = Store(root)
    store.write("file", b"old and long")
    store.write("file", b"new")
    assert store.read("file") == b"new"
    assert store.list() == ["file"]


@pytest.mark.parametrize("root", ["path", "s3"], indirect=True)
def test_another_process_s_writes_are_seen_at_once(root: str) -> None:
    store = Store(root)
    assert store.list() == []
    assert not store.exists("folder/file")
    code = "import sys; from millrace.connectors.storage.store import Store; Store(sys.argv[1]).write('folder/file', b'there')"
    subprocess.run([sys.executable, "-c", code, root], check=True)
    assert store.list() == ["folder/file"]
    assert store.exists("folder/file")
    assert store.read("folder/file") == b"there"


def test_children_and_urls_name_the_same_file(root: str) -> None:
    store = Store(root)
    child = store.child("runs", "one")
    child.write("x/y", b"1")
    assert store.read("runs/one/x/y") == b"1"
    assert child.list() == ["x/y"]
    assert Store(child.url).read("x/y") == b"1"
    folder, name = split_url(child.url_of("x/y"))
    assert folder.read(name) == b"1"


def test_a_file_comes_in_blocks_that_make_it_up(root: str) -> None:
    store = Store(root)
    data = bytes(range(256)) * 41
    store.write("blocks", data)
    blocks = list(store.blocks("blocks", size=1000))
    assert b"".join(blocks) == data
    assert {len(block) for block in blocks[:-1]} == {1000}


def test_a_missing_file_is_named(root: str) -> None:
    store = Store(root)
    for read in (store.read, store.read_json, store.entry, lambda path: list(store.blocks(path))):
        with pytest.raises(MissingFileError, match=r"none\.json: no such file"):
            read("none.json")


def test_json_is_read_back_and_broken_json_is_named(root: str) -> None:
    store = Store(root)
    store.write_json("good.json", {"a": [1, None, "ä"]})
    assert store.read_json("good.json") == {"a": [1, None, "ä"]}
    store.write("bad.json", b'{"a": ')
    with pytest.raises(CorruptFileError, match=r"bad\.json: not JSON"):
        store.read_json("bad.json")


def test_folders_are_copied_there_and_back(root: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "deep").mkdir(parents=True)
    (here / "deep" / "big").write_bytes(os.urandom(3 << 20))
    (here / "small").write_bytes(b"small")
    store = Store(root).child("store")
    entries = store.upload_dir(str(here), "checkpoints/1")
    assert [entry.path for entry in entries] == ["checkpoints/1/deep/big", "checkpoints/1/small"]
    assert store.entries(store.list()) == entries
    assert [entry.path for entry in store.child("all").upload_dir(str(here), "")] == ["deep/big", "small"]
    assert store.list("all") == ["all/deep/big", "all/small"]
    store.download_dir("checkpoints/1", str(there))
    assert (there / "deep" / "big").read_bytes() == (here / "deep" / "big").read_bytes()
    assert (there / "small").read_bytes() == b"small"
    with pytest.raises(MissingFileError, match="no such folder"):
        store.download_dir("checkpoints/2", str(there))


@pytest.mark.slow
def test_a_large_file_goes_to_an_object_store_in_parts_of_which_several_are_under_way(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(_touched(tmp_path / "files" / "large"), 201 << 20)
    calls = s3fs.S3FileSystem._call_s3
    now, most = 0, 0

    async def counted(self: s3fs.S3FileSystem, method: str, *args: object, **given: object) -> object:
        nonlocal now, most
        part = method == "upload_part"
        now, most = now + part, max(most, now + part)
        try:
            return await calls(self, method, *args, **given)
        finally:
            now -= part

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    store = Store(f"{s3_bucket}/{uuid.uuid4().hex}")
    (entry,) = store.upload_dir(str(tmp_path / "files"), "checkpoint")
    assert (now, most) == (0, 5)
    assert entry.size == 201 << 20
    assert store.entries(["checkpoint/large"]) == [entry]


def test_a_changed_bit_is_named_with_file_and_difference(root: str) -> None:
    store = Store(root)
    entry = store.write("file", b"abcdefgh")
    store.verify(entry)
    store.write("file", b"abcdefgi")
    with pytest.raises(CorruptFileError, match="file: its sha256 is"):
        store.verify(entry)
    store.write("file", b"abcd")
    with pytest.raises(CorruptFileError, match="file: its size is 4, what committed it says 8"):
        store.verify(entry)


def test_a_store_is_pickled_and_used_from_threads_and_from_asyncio(root: str) -> None:
    store: Store = pickle.loads(pickle.dumps(Store(root)))  # noqa: S301  (our own bytes)

    def use(number: int) -> bytes:
        store.write(f"folder/{number:03d}", b"%d" % number)
        return store.read(f"folder/{number:03d}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(40))) == [b"%d" % number for number in range(40)]

    async def many() -> list[bytes]:
        return await asyncio.gather(*(asyncio.to_thread(use, number) for number in range(40, 50)))

    assert len(asyncio.run(many())) == 10
    assert len(store.list("folder")) == 50


def test_writers_of_one_file_leave_one_of_their_versions(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    versions = [bytes([letter]) * 100_000 for letter in b"abcdef"]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda version: [store.write("file", version) for _ in range(10)], versions))
    assert store.read("file") in versions
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


WRITER = """
import sys
from millrace.connectors.storage.store import Store
store = Store(sys.argv[1])
print("ready", flush=True)
for number in range(10**6):
    store.write("file", bytes([97 + number % 26]) * 4_000_000)
"""


def test_a_writer_killed_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("file", b"old")
    left = 0
    for attempt in range(8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.003 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        data = store.read("file")
        assert data == b"old" or (len(data) == 4_000_000 and len(set(data)) == 1)
        assert store.list() == ["file"], "what a killed writer left is not listed"
        left += len(list(tmp_path.iterdir())) - 1
        store.sweep(older_than_s=0)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert left, "no writer was killed in the middle of a write: the test does not test"


def test_sweeping_leaves_young_files_that_may_be_writes_in_progress(tmp_path: Path) -> None:
    young = tmp_path / ".aside-young"
    young.write_bytes(b"half")
    assert Store(str(tmp_path)).sweep(older_than_s=60) == []
    os.utime(young, (0, 0))
    assert Store(str(tmp_path)).sweep(older_than_s=60) == [".aside-young"]


def test_a_full_disk_is_said_at_once_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    store.write("file", b"old")
    tries = []

    def full(handle: int) -> None:
        tries.append(handle)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        StorageError, match="file: cannot write: .*No space left.*the disk is full: free space"
    ):
        store.write("file", b"new")
    monkeypatch.undo()
    assert len(tries) == 1, "a full disk is not tried again"
    assert store.read("file") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Unsteady(MemoryFileSystem):
    """A filesystem on which every operation fails some times before it succeeds."""

    protocol = "unsteady"
    cachable = False
    failures = 2
    left: dict[tuple[str, str], int] = {}
    lock = threading.Lock()

    def _maybe_fail(self, verb: str, path: str) -> None:
        with self.lock:
            left = Unsteady.left.setdefault((verb, path), Unsteady.failures)
            Unsteady.left[verb, path] = left - 1
        if left > 0:
            raise OSError(errno.EIO, "the network is down")

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: object
    ) -> bytes:
        self._maybe_fail("read", path)
        return super().cat_file(path, start, end, **options)

    def pipe_file(self, path: str, value: bytes, **options: object) -> None:
        self._maybe_fail("write", path)
        super().pipe_file(path, value, **options)

    def find(self, path: str, **options: object) -> list[str]:
        self._maybe_fail("list", path)
        return super().find(path, **options)


@pytest.fixture
def unsteady(monkeypatch: pytest.MonkeyPatch) -> Store:
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    monkeypatch.setattr(faults, "LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(Unsteady, "left", {})
    return Store("unsteady://x")


def test_transient_failures_are_tried_again(unsteady: Store) -> None:
    unsteady.write("file", b"data")
    assert unsteady.read("file") == b"data"
    assert unsteady.list() == ["file"]


def test_a_failure_that_lasts_is_an_error_that_names_file_and_cause(
    unsteady: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unsteady, "failures", 10**9)
    with pytest.raises(
        StorageError, match=r"unsteady://x/file: cannot write: .*network is down.*failed repeatedly"
    ):
        unsteady.write("file", b"data")
    assert Unsteady.left["write", "x/file"] == 10**9 - faults.ATTEMPTS


def test_defects_are_not_taken_for_storage_failures(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Store(str(tmp_path)).write("file", 3)  # type: ignore[arg-type]


def test_writability_is_checked_without_leaving_anything(root: str) -> None:
    Store(root).check_writable()
    assert Store(root).list() == []


def test_a_root_that_cannot_be_written_is_named_with_the_field(tmp_path: Path, s3_bucket: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"storage\.root = .*file/runs: cannot write"):
        Store(str(tmp_path / "file" / "runs")).check_writable()
    with pytest.raises(
        StorageError, match=r"storage\.root = s3://absent/runs: .*bucket or folder does not exist"
    ):
        Store("s3://absent/runs").check_writable()


def test_an_endpoint_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, s3_bucket: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(StorageError, match=r"storage\.root = s3://bucket/runs: .*127\.0\.0\.1:9"):
        Store("s3://bucket/runs").check_writable()


def test_a_root_without_a_folder_is_refused() -> None:
    for root in ("s3://", ""):
        with pytest.raises(StorageError, match="names no folder"):
            Store(root)
    with pytest.raises(StorageError, match="names no file"):
        split_url("memory://file.jsonl")


def test_what_a_run_writes_only_its_user_can_read_and_what_was_there_stays_as_it_was(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    before = os.umask(0o022)
    try:
        store = Store(str(shared / "root")).child("run")
        store.write_json("iterations/000000/manifest.json", {})
        (shared / "file").write_text("weights")
        store.upload_dir(str(shared), "checkpoints/000001")
        store.download_dir("iterations", str(shared / "copy"))
    finally:
        os.umask(before)
    made = [*(shared / "root").rglob("*"), shared / "root", *(shared / "copy").rglob("*"), shared / "copy"]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}
    assert shared.stat().st_mode & 0o777 == 0o755


def test_the_home_is_closed_to_others_and_a_secret_in_it_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir(mode=0o755)  # as an earlier millrace left it
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    with ThreadPoolExecutor(8) as pool:
        found = {path.read_text() for path in pool.map(secret_file, ["token"] * 8)}
    (secret,) = found
    assert len(secret) == 64
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "home" / "token").stat().st_mode & 0o777 == 0o600


def _touched(path: Path) -> Path:
    path.parent.mkdir()
    path.touch()
    return path
