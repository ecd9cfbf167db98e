"""Every kind of file of a run, changed in every way: what reads it gets what was written, or names the file. Never other numbers.

The kinds are those of a real run with an open iteration that a second driver took over: a kind of file without a row fails.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.connectors.storage.checkpoint_files import check_marker, checkpoint_files
from millrace.connectors.storage.iteration_files import commit_again
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.errors import CorruptFileError, MissingFileError
from millrace.flows.commands.verify import verify_run
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
from tests.support.tampering import (
    KINDS,
    UNREAD,
    WAYS,
    Readers,
    another,
    check,
    check_verify,
    kind_of,
    linked,
    of_another_run,
    one_bit,
    outcome,
    removed,
    reopened,
    victim,
)


@pytest.fixture(scope="module")
def stored(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `a` as its third driver leaves it that dies before it publishes the last iteration.

    The second took over the iteration before, and committed it.
    """
    run = tmp_path_factory.mktemp("stored") / "a"
    reopened(whole, run)
    return run


def test_every_kind_of_file_has_a_row(stored: Path) -> None:
    found = {path.relative_to(stored).as_posix() for path in stored.rglob("*") if path.is_file()}
    # traces are for Perfetto alone
    nothing_reads = {path for path in found if path.startswith(("logs/", "traces/")) or path == "lease/lock"}
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


# of the iteration under way, whose records the committed one has too
SISTERS = [f"{UNDER_WAY}/results/{task}.json" for task in TASKS if task not in ("rollout", "filter")]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, way)
        if number % len(WAYS) == place and kind not in SISTERS
        else pytest.param(kind, way, marks=pytest.mark.slow)
        for number, kind in enumerate(KINDS)
        for place, way in enumerate(WAYS)
    ],
)
def test_a_changed_file_gives_the_same_numbers_or_is_named(
    stored: Path, readers: Readers, expected: dict[str, Numbers], tmp_path: Path, kind: str, way: str
) -> None:
    """Each kind in one way, each way on many kinds; with `-m slow` each kind of each iteration in every way."""
    path = victim(stored, kind)
    linked(stored, tmp_path / "a")
    WAYS[way](Store(str(tmp_path / "a")), path, another(stored, path))
    check_verify(str(tmp_path), path, way, path in UNREAD)
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
        check_verify(root, path, way, path in UNREAD)
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
