"""Every kind of file of a run, changed in every way: what reads it gets what was written, or names the file. Never other numbers.

The kinds are those of a real run with an open iteration: a kind of file without a row fails. What needs a trainer is tried where
its files are read: records, the batch in a rank, the choice of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.connectors.megatron.rank import TrainerRank
from millrace.connectors.storage.checkpoint_files import check_marker, marker_files
from millrace.connectors.storage.iteration_files import IterationFiles, commit_again
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.errors import CorruptFileError, MillraceError, MissingFileError, StorageError
from millrace.flows.tools.branch import branch_run
from millrace.flows.tools.browse import run_record
from millrace.flows.tools.replay import _download_export
from millrace.flows.tools.sql import VIEWS, connect
from millrace.flows.tools.verify import verify_run
from millrace.tasks.context import IterationContext
from millrace.tasks.run_recorded import _check_found
from millrace.tasks.runtime.trainer import recorded_step

OPEN, STEPS = 2, 2  # the run's open iteration, and its steps an iteration
COMMITTED, UNDER_WAY = f"iterations/{OPEN - 1:06d}", f"iterations/{OPEN:06d}"
TASKS = ("sample_prompts", "rollout", "reward", "filter", "train_step", "sync_weights", "checkpoint")
IN_ITERATION = (
    "prompts.parquet",
    "verdicts.parquet",
    "batch.parquet",
    "step.json",
    "rollouts/part",
    "rewards/part",
    "results/evaluate.json",
    *(f"results/{task}.json" for task in TASKS),
)
KINDS = (
    *(f"{COMMITTED}/{name}" for name in (*IN_ITERATION, "manifest.json", "results/publish.json")),
    *(f"{UNDER_WAY}/{name}" for name in IN_ITERATION),
    *(f"checkpoints/000003/{name}" for name in (".metadata", "__0_0.distcp", "common.pt", "metadata.json")),
    "checkpoints/000003/complete.json",
    "exports/000003/model.safetensors",
    "exports/000003/config.json",
    "eval/held_out/000002.parquet",
    "quarantine.parquet",
    "run.json",
    "lease/000001.json",
)
UNREAD = ("lease/000001.json",)  # whose own test is tests/connectors/storage/test_lease.py
ON_S3 = (f"{COMMITTED}/manifest.json",)
Numbers = dict[str, Any]


def kind_of(path: str) -> str:
    """The row of a file: parts have one, and so have the files of an export beside weights and configuration."""
    path = re.sub(r"/part-[^/]*$", "/part", path)
    path = re.sub(r"^iterations/000000/", f"{COMMITTED}/", path)
    path = re.sub(r"^checkpoints/\d+/", "checkpoints/000003/", path)
    path = re.sub(r"^eval/held_out/\d+", "eval/held_out/000002", path)
    path = path.replace("evaluate_before.json", "evaluate.json")
    is_export = path.startswith("exports/") and not path.endswith((".safetensors", "config.json"))
    return "exports/000003/config.json" if is_export or "_config.json" in path else path


@pytest.fixture(scope="module")
def stored(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `a` as a driver leaves it that dies before it publishes the last iteration."""
    run = tmp_path_factory.mktemp("stored") / "a"
    shutil.copytree(whole, run)
    (run / UNDER_WAY / "manifest.json").unlink()
    (run / UNDER_WAY / "results" / "publish.json").unlink()
    return run


def test_every_kind_of_file_has_a_row(stored: Path) -> None:
    found = {path.relative_to(stored).as_posix() for path in stored.rglob("*") if path.is_file()}
    nothing_reads = {path for path in found if path.startswith("logs/") or path == "lease/lock"}
    assert {kind_of(path) for path in found - nothing_reads} == set(KINDS)


# what is done with a run: each returns the numbers that it read


def resume(root: str) -> Numbers:
    """What a driver reads before it goes on with the open iteration, and its trainer to hold the newest version."""
    folder, record = RunFolder(root, "a"), run_record(root, "a")
    commit_again(folder)
    ctx = IterationContext(
        cast(Any, SimpleNamespace(run=SimpleNamespace(name="a"))),
        OPEN,
        cast(Any, SimpleNamespace(run_folder=folder)),
    )
    for task in (*TASKS, "evaluate"):
        _check_found(ctx, task)
    files = IterationFiles(folder, OPEN)
    there = {task: files.record(task) for task in (*TASKS, "evaluate")}
    return {
        "config": record["config"],
        "data": record["data"],
        "history": [history.model_dump() for history in folder.history()],
        **{task: record for task, record in there.items() if record},  # a task without a record runs again
        **brought_up(folder, OPEN + 1),
    }


def replay(root: str) -> Numbers:
    """What a replay of the committed iterations reads, and the export after the last one."""
    folder, record = RunFolder(root, "a"), run_record(root, "a")
    folder.manifests()
    exported = Path(root) / f"export-{uuid.uuid4().hex}" if "://" not in root else None
    read = brought_up(folder, OPEN)
    if exported:
        _download_export(folder, OPEN + 1, exported)
        read["export"] = {path.name: digest(path.read_bytes()) for path in exported.iterdir()}
        shutil.rmtree(exported)
    return {"config": record["config"], **read}


def brought_up(folder: RunFolder, iterations: int) -> Numbers:
    """The rows and figures of the steps up to an iteration, and what the checkpoint that is taken holds.

    As bring_up of the trainer takes them; a checkpoint that is not whole gives way, with replay of all steps.
    """
    rank, numbers = TrainerRank({}, 0, 1), {}
    for index in range(iterations):
        files = IterationFiles(folder, index)
        if "batch.parquet" not in files.entries and index == OPEN:
            continue  # the filter runs again
        entry = files.entry("batch.parquet")
        rows = rank._read(files.folder.url_of(entry.path), entry.sha256)
        numbers[f"rows {index}"] = digest(
            repr([(row.sample_id, row.tokens, row.advantage) for row in rows]).encode()
        )
        steps = [recorded_step(files, index * STEPS + step) for step in (1, 2)]
        if steps[0] is not None:
            numbers[f"steps {index}"] = steps
    done = iterations
    try:
        entries = marker_files(check_marker(folder, done, done * STEPS))
        store = folder.store.child(folder.checkpoint_path(done))
        for file in entries:
            store.verify(file)
        numbers["shards"] = [(file.path, digest(store.read(file.path))) for file in entries]
    except (CorruptFileError, MissingFileError):
        pass  # replayed
    return numbers


def branch(root: str) -> Numbers:
    """Every file that a branch of the run begins with."""
    name = f"branch-{uuid.uuid4().hex}"
    branch_run(root, "a", name, OPEN)
    store = Store(root).child(name)
    made = {path: digest(store.read(path)) for path in store.list() if path != "run.json"}
    record = store.read_sealed("run.json")
    store.remove("", recursive=True)
    return {**made, "parent": record["parent"]["config"], "data": record["data"]}


def evaluate(root: str) -> Numbers:
    """Held-out figures, as records and tables hold them."""
    connection = connect(root, "a", ["evaluations"])
    rows = connection.sql("select * from evaluations order by all").fetchall()
    folder = RunFolder(root, "a")
    kept = [IterationFiles(folder, index).record("evaluate") for index in range(OPEN)]
    return {"rows": repr(rows), "records": kept}


def sql(root: str) -> Numbers:
    """Every view but the evaluations'."""
    connection = connect(root, "a", [*VIEWS, "steps"])
    return {
        view: digest(repr(connection.sql(f"select * from {view} order by all").fetchall()).encode())
        for view in (*VIEWS, "steps")
    }


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


READERS: dict[str, Callable[[str], Numbers]] = {
    "resume": resume,
    "replay": replay,
    "branch": branch,
    "evaluate": evaluate,
    "sql": sql,
}


# what is done to a file


def one_bit(store: Store, path: str, _: bytes) -> None:
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.write(path, bytes(data))


def truncated(store: Store, path: str, _: bytes) -> None:
    data = store.read(path)
    store.write(path, data[: len(data) // 2])


def replaced(store: Store, path: str, another: bytes) -> None:
    store.write(path, another)


def removed(store: Store, path: str, _: bytes) -> None:
    store.remove(path)


def doubled(store: Store, path: str, _: bytes) -> None:
    folder, name = path.rsplit("/", 1) if "/" in path else ("", path)
    part = re.fullmatch(r"part-[0-9a-f]{32}(\.[0-9a-f]{16}\.parquet)", name)
    copy = f"part-{'0' * 32}{part[1]}" if part else f"copy of {name}"
    store.write(f"{folder}/{copy}" if folder else copy, store.read(path))


WAYS = {way.__name__: way for way in (one_bit, truncated, replaced, removed, doubled)}


def linked(run: Path, into: Path) -> None:
    """A copy of a run that shares its bytes; a file that is written anew is another one."""
    shutil.copytree(run, into, copy_function=os.link)


def victim(run: Path, kind: str) -> str:
    """The first file of a kind."""
    if not kind.endswith("/part"):
        return kind
    return sorted(path.relative_to(run).as_posix() for path in run.glob(f"{kind}-*"))[0]


def another(run: Path, path: str) -> bytes:
    """A whole file of the same kind that belongs elsewhere in the run."""
    folder, name = path.rsplit("/", 1) if "/" in path else ("", path)
    if name.startswith("part-"):
        return next(file.read_bytes() for file in sorted((run / folder).glob("part-*")) if file.name != name)
    for number in ("000000", "000001", "000002", "000003"):
        elsewhere = run / re.sub(r"(?<=/)\d{6}(?=/|\.)", number, path)
        if elsewhere.is_file() and elsewhere.read_bytes() != (run / path).read_bytes():
            return elsewhere.read_bytes()
    if name.endswith(".json"):
        content = json.loads((run / path).read_text())
        return json.dumps({**content, "data": [], "seed_name": "another", "eos_token_id": 3}).encode()
    return (run / "exports/000003/model.safetensors").read_bytes()[::-1]


@pytest.fixture(scope="module")
def expected(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Numbers]:
    """The numbers of the run as it is."""
    root = tmp_path_factory.mktemp("expected")
    linked(stored, root / "a")
    assert verify_run(str(root), "a").problems == verify_run(str(root), "a").strangers == []
    return {name: reader(str(root)) for name, reader in READERS.items()}


def outcome(reader: Callable[[str], Numbers], root: str) -> tuple[Numbers, MillraceError | None]:
    """What a reader has read, or its error."""
    try:
        return reader(root), None
    except MillraceError as error:
        return {}, error


def check(root: str, path: str, way: str, expected: dict[str, Numbers]) -> None:
    """Each reader has the expected numbers, or fewer where a task runs again or a step is replayed, or names the file."""
    for name, reader in READERS.items():
        numbers, refused = outcome(reader, root)
        if refused:
            assert path.rsplit("/", 1)[-1] in str(refused), f"{name} of {way} {path}: {refused}"
            assert refused.remedy, f"{name} of {way} {path}: {refused}"
        for key, value in numbers.items():
            assert value == expected[name].get(key), f"{name} of {way} {path}: {key}"


def runs_again(path: str) -> bool:
    """Whether a file's absence only means that its task runs again, or that another checkpoint is taken."""
    of_open_task = path.startswith(f"{UNDER_WAY}/results/")
    return of_open_task or path.endswith(("complete.json", "results/publish.json"))


def check_verify(root: str, path: str, way: str) -> None:
    """verify names the file as broken; a copy of it as a stranger."""
    try:
        verdict = verify_run(root, "a")
        problems, strangers = verdict.problems, verdict.strangers
    except StorageError as error:
        problems, strangers = [str(error)], []
    if path in UNREAD or (way == "removed" and runs_again(path)):
        return
    if way == "doubled":
        assert problems == []
        assert len(strangers) == 1, strangers
        return
    assert any(path.rsplit("/", 1)[-1] in line for line in problems), (way, path, problems)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, way) if number % len(WAYS) == place else pytest.param(kind, way, marks=pytest.mark.slow)
        for number, kind in enumerate(KINDS)
        for place, way in enumerate(WAYS)
    ],
)
def test_a_changed_file_gives_the_same_numbers_or_is_named(
    stored: Path, expected: dict[str, Numbers], tmp_path: Path, kind: str, way: str
) -> None:
    """Each kind in one way, each way on many kinds; with `-m slow` each kind in every way."""
    path = victim(stored, kind)
    linked(stored, tmp_path / "a")
    WAYS[way](Store(str(tmp_path / "a")), path, another(stored, path))
    check_verify(str(tmp_path), path, way)
    check(str(tmp_path), path, way, expected)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ON_S3 else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
        if not kind.startswith("exports/")
    ],
)
def test_a_changed_object_gives_the_same_numbers_or_is_named(
    stored: Path, expected: dict[str, Numbers], s3_bucket: str, kind: str
) -> None:
    root, path = f"{s3_bucket}/{uuid.uuid4().hex}", victim(stored, kind)
    store = Store(root).child("a")
    Store(root).upload_dir(str(stored), "a")
    small = [name for name in store.list() if name.endswith(".json")]
    whole = {name: store.read(name) for name in {*small, path}}
    for way, change in WAYS.items():
        before = set(store.list())
        change(store, path, another(stored, path))
        check_verify(root, path, way)
        check(root, path, way, expected)
        for name in set(store.list()) - before:
            store.remove(name)
        for name, data in whole.items():
            store.write(name, data)


def test_a_manifest_that_is_removed_is_made_again_as_it_was(stored: Path, tmp_path: Path) -> None:
    """A run whose newest manifest was gone went on, and could never be resumed again."""
    linked(stored, tmp_path / "a")
    for index in (OPEN - 1, 0):
        manifest = tmp_path / "a" / f"iterations/{index:06d}" / "manifest.json"
        whole = manifest.read_bytes()
        manifest.unlink()
        with pytest.raises(MissingFileError, match="start the run again: it is made again"):
            RunFolder(str(tmp_path), "a").manifests()
        folder = RunFolder(str(tmp_path), "a")
        assert commit_again(folder) == [index]
        assert manifest.read_bytes() == whole
        assert folder.first_open_iteration() == OPEN


def test_a_manifest_that_cannot_be_made_again_as_it_was_is_named(stored: Path, tmp_path: Path) -> None:
    linked(stored, tmp_path / "a")
    store = Store(str(tmp_path / "a" / COMMITTED))
    store.remove("manifest.json")
    removed(store, sorted(store.list("rewards"))[0], b"")
    with pytest.raises(MissingFileError, match=r"rewards/part-.*millrace discard a --iteration 2"):
        commit_again(RunFolder(str(tmp_path), "a"))


def test_without_the_folder_of_a_broken_checkpoint_the_one_before_counts(
    stored: Path, tmp_path: Path
) -> None:
    linked(stored, tmp_path / "a")
    folder = RunFolder(str(tmp_path), "a")
    one_bit(folder.store, "checkpoints/000003/complete.json", b"")
    with pytest.raises(CorruptFileError):
        check_marker(folder, 3, 3 * STEPS)
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "000003")
    assert folder.complete_checkpoints() == [2]
    assert marker_files(check_marker(folder, 2, 2 * STEPS))
