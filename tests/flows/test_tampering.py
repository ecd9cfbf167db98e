"""Every kind of file of a run, changed in every way: what reads it gets what was written, or names the file. Never other numbers.

The kinds are those of a real run with an open iteration that a second driver took over: a kind of file without a row fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.connectors.storage.checkpoint_files import check_marker, checkpoint_files
from millrace.connectors.storage.iteration_files import commit_again
from millrace.connectors.storage.lease import Lease
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.sealed import PLACE, check_seal, sealed
from millrace.connectors.storage.store import Store
from millrace.core.errors import CorruptFileError, MillraceError, MissingFileError, StorageError
from millrace.flows.tools.browse import run_record
from millrace.flows.tools.verify import verify_run
from millrace.tasks.publish import _commit
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import Workplace
from tests.support.run_readers import (
    COMMITTED,
    OPEN,
    STEPS,
    TASKS,
    UNDER_WAY,
    Evaluation,
    Numbers,
    branch,
    ledger,
    replay,
    resume,
    sql,
)

IN_ITERATION = (
    "prompts.parquet",
    "verdicts.parquet",
    "batch.parquet",
    "step.json",
    "rollouts/part",
    "rewards/part",
    "evaluations/part",
    "results/evaluate.json",
    "takeover.json",
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
ANOTHER = "0" * 32  # id of another run
Readers = dict[str, Callable[[str], Numbers]]


def kind_of(path: str) -> str:
    """The row of a file: parts have one, and so have the files of an export beside weights and configuration."""
    path = re.sub(r"/part-[^/]*$", "/part", path)
    path = re.sub(r"^lease/\d+", "lease/000001", path)
    path = re.sub(r"/takeover-\d+", "/takeover", path)
    path = re.sub(r"^iterations/000000/", f"{COMMITTED}/", path)
    path = re.sub(r"^checkpoints/\d+/", "checkpoints/000003/", path)
    path = re.sub(r"^eval/held_out/\d+", "eval/held_out/000002", path)
    path = path.replace("evaluate_before.json", "evaluate.json")
    is_export = path.startswith("exports/") and not path.endswith((".safetensors", "config.json"))
    return "exports/000003/config.json" if is_export or "_config.json" in path else path


@pytest.fixture(scope="module")
def stored(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `a` as its third driver leaves it that dies before it publishes the last iteration.

    The second took over the iteration before, and committed it.
    """
    run = tmp_path_factory.mktemp("stored") / "a"
    shutil.copytree(whole, run)
    metrics = json.loads((run / COMMITTED / "manifest.json").read_text())["tasks"]["metrics"]
    for iteration in (COMMITTED, UNDER_WAY):
        (run / iteration / "manifest.json").unlink()
        (run / iteration / "results" / "publish.json").unlink()
    folder, run_id = driven(run)
    ctx = SimpleNamespace(run_folder=folder, index=OPEN - 1, folder=folder.iteration(OPEN - 1), records={})
    published = {"metadata": {}, "result": json.dumps(_commit(cast(Any, ctx), metrics))}
    folder.store.write_sealed(f"{COMMITTED}/results/publish.json", published, run=run_id)
    cast(Lease, folder.store.fence).release()
    folder, _ = driven(run)
    cast(Lease, folder.store.fence).release()
    return run


def driven(run: Path) -> tuple[RunFolder, str]:
    """The folder as a driver holds it that has just taken over, and the run's id."""
    folder, run_id = RunFolder(str(run.parent), run.name), run_record(str(run.parent), run.name)["id"]
    folder.store.fence = Lease.take(folder.store)
    folder.owner.drive_as(run_id)
    folder.take_over()
    return folder, run_id


def test_every_kind_of_file_has_a_row(stored: Path) -> None:
    found = {path.relative_to(stored).as_posix() for path in stored.rglob("*") if path.is_file()}
    nothing_reads = {path for path in found if path.startswith("logs/") or path == "lease/lock"}
    assert {kind_of(path) for path in found - nothing_reads} == set(KINDS)
    for folder in {path.rpartition("/")[0] for path in found} - {"logs"}:
        assert kind_of(f"{folder}/new.json".lstrip("/")) not in KINDS or folder.startswith("exports/")


@pytest.fixture(scope="module")
def readers(
    stored: Path, workplace: Workplace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Readers]:
    """What reads a run, by name; each returns the numbers that it read."""
    log = tmp_path_factory.mktemp("engine") / "log"
    with embedded_engine(stored / "exports" / "000003", log=log) as (url, _):
        evaluate = Evaluation(url, workplace.folder)
        yield {
            "resume": resume,
            "replay": replay,
            "branch": branch,
            "evaluate": evaluate,
            "sql": sql,
            "ledger": ledger,
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


def of_another_run(store: Store, path: str, _: bytes) -> None:
    """As a run of the same name under another root would have it there: whole, sealed, with other numbers."""
    content = store.read_json(path)
    if path.endswith("manifest.json"):
        tasks = {**content["tasks"], "metrics": {}}
        other = Manifest.model_validate({**content, "run": ANOTHER, "tasks": tasks}).sealed()
        store.write_json(path, other.model_dump(mode="json"))
        return
    opened = check_seal(content, store.url_of(path))
    if path == "run.json":
        store.write_sealed(path, {**opened, "id": ANOTHER, "data": []})
        return
    if "result" in opened:
        opened["result"] = json.dumps({**json.loads(opened["result"]), "seconds": 1e9, "metrics": {}})
    store.write_json(path, sealed(opened, content[PLACE], ANOTHER))


WAYS = {way.__name__: way for way in (one_bit, truncated, replaced, removed, doubled)}


def linked(run: Path, into: Path) -> None:
    """A copy of a run that shares its bytes; a file that is written anew is another one."""
    shutil.copytree(run, into, copy_function=os.link)


def victim(run: Path, kind: str) -> str:
    """The first file of a kind."""
    if (run / kind).is_file():
        return kind
    pattern = kind.replace("/takeover.json", "/takeover-*") if "takeover" in kind else f"{kind}-*"
    return sorted(path.relative_to(run).as_posix() for path in run.glob(pattern))[0]


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
def expected(stored: Path, readers: Readers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Numbers]:
    """The numbers of the run as it is."""
    root = tmp_path_factory.mktemp("expected")
    linked(stored, root / "a")
    assert verify_run(str(root), "a").problems == verify_run(str(root), "a").strangers == []
    numbers = {name: reader(str(root)) for name, reader in readers.items()}
    again = RunFolder(str(root), "a").iteration(OPEN).read_json("results/evaluate.json")
    assert numbers["evaluate"]["evaluated again"] == json.loads(again["result"])["sets"]
    return numbers


def outcome(reader: Callable[[str], Numbers], root: str) -> tuple[Numbers, MillraceError | None]:
    """What a reader has read, or its error."""
    try:
        return reader(root), None
    except MillraceError as error:
        return {}, error


def check(root: str, path: str, way: str, readers: Readers, expected: dict[str, Numbers]) -> None:
    """Each reader has the expected numbers, or fewer where a task runs again or a step is replayed, or names the file."""
    for name, reader in readers.items():
        numbers, refused = outcome(reader, root)
        if refused:
            assert path.rsplit("/", 1)[-1] in str(refused), f"{name} of {way} {path}: {refused}"
            assert refused.remedy, f"{name} of {way} {path}: {refused}"
        for key, value in numbers.items():
            assert value == expected[name].get(key), f"{name} of {way} {path}: {key}"


def runs_again(path: str) -> bool:
    """Whether a file's absence only means that its task runs again, or that another checkpoint is taken."""
    of_open_task = path.startswith(f"{UNDER_WAY}/results/")
    note = path.startswith(
        f"{UNDER_WAY}/takeover"
    )  # without it all parts count; its iteration's records name them
    return of_open_task or note or path.endswith(("complete.json", "results/publish.json"))


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
    stored: Path, readers: Readers, expected: dict[str, Numbers], tmp_path: Path, kind: str, way: str
) -> None:
    """Each kind in one way, each way on many kinds; with `-m slow` each kind in every way."""
    path = victim(stored, kind)
    linked(stored, tmp_path / "a")
    WAYS[way](Store(str(tmp_path / "a")), path, another(stored, path))
    check_verify(str(tmp_path), path, way)
    check(str(tmp_path), path, way, readers, expected)


OF_ONE_RUN = (
    *("run.json", f"{COMMITTED}/manifest.json", f"{UNDER_WAY}/results/rollout.json"),
    *(f"{COMMITTED}/results/publish.json", f"{UNDER_WAY}/takeover.json", "checkpoints/000003/complete.json"),
    *(f"{at}/results/{task}.json" for at in (COMMITTED, UNDER_WAY) for task in (*TASKS, "evaluate")),
)


@pytest.mark.parametrize(
    "kind",
    [
        kind if number < 4 else pytest.param(kind, marks=pytest.mark.slow)
        for number, kind in enumerate(dict.fromkeys(OF_ONE_RUN))
    ],
)
def test_a_file_of_another_run_of_the_same_name_is_named(
    stored: Path, readers: Readers, expected: dict[str, Numbers], tmp_path: Path, kind: str
) -> None:
    """Whole and sealed, it went unnoticed."""
    path = victim(stored, kind)
    linked(stored, tmp_path / "a")
    of_another_run(Store(str(tmp_path / "a")), path, b"")
    check_verify(str(tmp_path), path, "of another run")
    check(str(tmp_path), path, "of another run", readers, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("exports/")])
def test_a_changed_object_gives_the_same_numbers_or_is_named(
    stored: Path, readers: Readers, expected: dict[str, Numbers], s3_bucket: str, kind: str
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
        check(root, path, way, readers, expected)
        for name in set(store.list()) - before:
            store.remove(name)
        for name, data in whole.items():
            store.write(name, data)


@pytest.mark.parametrize("kind", ["rollouts/part", "rewards/part"])
@pytest.mark.parametrize("way", ["one_bit", "truncated", "replaced", "doubled"])
def test_a_changed_part_of_a_task_without_a_record_is_named_by_sql(
    stored: Path, expected: dict[str, Numbers], tmp_path: Path, kind: str, way: str
) -> None:
    """Its name has its hash. Without any record the open iteration's rows are those of its files."""
    linked(stored, tmp_path / "a")
    for record in (tmp_path / "a" / UNDER_WAY / "results").iterdir():
        record.unlink()
    assert outcome(sql, str(tmp_path)) == (expected["sql"], None)
    path = victim(stored, f"{UNDER_WAY}/{kind}")
    WAYS[way](Store(str(tmp_path / "a")), path, another(stored, path))
    numbers, refused = outcome(sql, str(tmp_path))
    if way == "doubled":
        assert numbers == expected["sql"]
    else:
        assert refused is not None
        assert path.rsplit("/", 1)[-1] in str(refused)
        assert refused.remedy


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
    with pytest.raises(MissingFileError, match=r"rewards/part-.*millrace discard a --from 2"):
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
    assert checkpoint_files(folder, 2, 2 * STEPS)
