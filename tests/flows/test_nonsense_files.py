"""JSON files of a run that hold something else: each reader names the file and what helps, or reads what it read before.

The rows are the files of a stored run that are JSON, by the contents that an editor, a full disk or a careless copy leaves.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.host.process_identity import ProcessIdentity
from millrace.connectors.storage.driven_runs import DrivenRun
from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.lease import Lease, holder_of
from millrace.connectors.storage.parts import list_notes, take_over_parts
from millrace.connectors.storage.run_folder import CUT, RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.errors import StorageError
from millrace.flows.commands.branch import branch_run
from millrace.flows.commands.ledger import accounts_of_run
from millrace.flows.commands.runs import runs_listing
from millrace.flows.commands.show import run_listing
from millrace.flows.commands.sql import answer
from millrace.flows.commands.verify import verify_run
from millrace.flows.driver.named_model import _commit, settled
from millrace.flows.driver.run_record import run_id
from millrace.flows.preflight.check_run import StoredRun, check_run
from tests.support.permissions import modes_hold
from tests.support.run_readers import TASKS
from tests.support.stored_run import CONFIG, write_run
from tests.support.tampering import KINDS, outcome

CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "an empty object": lambda _: b"{}",
    "an empty list": lambda _: b"[]",
    "nothing": lambda _: b"",
    "half of it": lambda whole: whole[: len(whole) // 2],
    "null": lambda _: b"null",
    "a number": lambda _: b"3",
    "a text": lambda _: b'"run"',
    "another object": lambda _: b'{"name": "a", "config": {}, "attempts": [], "result": "{}", "files": []}',
    "another kind of hash": lambda _: b'{"sha256": 3, "sealed_at": null, "token": "x", "iteration": 0}',
    "no text": lambda _: b"\x00\xff\xfe",
    "deep lists": lambda _: b"[" * 100_000,
}
CONFIGURATION = RunConfig.model_validate({**CONFIG, "storage": {"root": "."}})


def problems(root: str) -> list[str]:
    """What `millrace check` says of the run."""
    config = CONFIGURATION.model_copy(
        update={"storage": CONFIGURATION.storage.model_copy(update={"root": root})}
    )
    return [f"{problem.reason}; {problem.remedy}" for problem in check_run(config, StoredRun())]


def branched(root: str) -> Any:
    branch_run(root, "a", "b", 2)
    shutil.rmtree(Path(root) / "b")
    return None


def as_named(root: str) -> Any:
    """What a start asks of a run of the same name before it begins."""
    config = CONFIGURATION.model_copy(
        update={"storage": CONFIGURATION.storage.model_copy(update={"root": root})}
    )
    return _commit(config), settled(config).dtype


def orphaned(root: str) -> bool:
    """Whether a later start ends the actors that a dead driver left."""
    return DrivenRun(
        identity="i",
        name="a",
        url=f"{root}/a",
        run_id="r",
        ray_address=None,
        driver=ProcessIdentity.own().model_copy(update={"started": 1.0}),
        flow_run_id=None,
    ).is_orphaned()


READERS: dict[str, Callable[[str], Any]] = {
    "runs": lambda root: runs_listing(root).rows,
    "show": lambda root: run_listing(root, "a").rows,
    "show --columns": lambda root: run_listing(root, "a", ["reward/*"]).rows,
    "sql": lambda root: answer(root, "a", "select count(*) from samples").rows,
    "ledger": lambda root: accounts_of_run(root, "a").listing.rows,
    "verify": lambda root: verify_run(root, "a").problems,
    "branch": branched,
    "check": problems,
    "run_id": lambda root: run_id(RunFolder(root, "a").store),
    "the lease": lambda root: holder_of(RunFolder(root, "a").store) is None,
    "a start": as_named,
    "orphans": orphaned,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with each kind of JSON file."""
    root = tmp_path_factory.mktemp("runs")
    folder = write_run(str(root))
    shard = folder.store.write("checkpoints/000002/shard", b"weights")
    files = [{**shard.record(), "path": "shard"}]
    folder.store.write_sealed("checkpoints/000002/complete.json", {"version": 2, "files": files})
    record = folder.store.read_sealed("run.json")
    held = {"path": "p", "size": 1, "sha256": "", "rows": 1, "usable": 1, "usable_sha256": ""}
    data = [{"since": 0, "sources": dict.fromkeys(("sums", "chats"), held)}]
    folder.store.write_sealed("run.json", {**record, "id": "r", "data": data})
    opened = folder.iteration(2)
    folder.store.fence = Lease.take(folder.store)
    take_over_parts(opened, ("rollouts",), 2, "r")
    folder.store.fence.release()
    opened.write_sealed(CUT, {"trained": [], "deferred": {}, "parts": []})
    folder.iteration(1).write_sealed(record_path("publish"), {"result": "{}"})
    for task in (*TASKS, "evaluate"):
        if not opened.exists(record_path(task)):
            opened.write_sealed(record_path(task), {"result": json.dumps({"files": [], "sets": {}})})
    return root / "a"


def paths(run: Path) -> list[str]:
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*.json"))


def test_the_run_has_each_kind_of_json_file(stored: Path) -> None:
    there = {path.rpartition("/")[2] for path in paths(stored)}
    kinds = {kind.rpartition("/")[2] for kind in KINDS if kind.endswith(".json") and "exports" not in kind}
    takeovers = set(list_notes(Store(str(stored / "iterations/000002"))))
    assert kinds - there - {"takeover.json", "metadata.json"} == set()  # metadata.json is Megatron's
    assert takeovers <= there
    assert takeovers


@pytest.fixture(scope="module")
def expected(stored: Path) -> dict[str, Any]:
    """What each reader reads of the run as it is."""
    return {name: reader(str(stored.parent)) for name, reader in READERS.items()}


@pytest.mark.parametrize(
    ("content", "each"),
    [
        pytest.param(content, each, marks=[pytest.mark.slow] * each, id=f"{content}{' in each' * each}")
        for content in CONTENTS
        for each in (False, True)
    ],
)
def test_what_holds_nonsense_is_named_with_what_helps(
    stored: Path, tmp_path: Path, expected: dict[str, Any], content: str, each: bool
) -> None:
    """Every content in run.json, and every other file with one of them; with `-m slow` every file with every content."""
    place = list(CONTENTS).index(content)
    for number, path in enumerate(paths(stored)):
        if not each and path != "run.json" and number % len(CONTENTS) != place:
            continue
        shutil.copytree(stored, tmp_path / "a")
        file = tmp_path / "a" / path
        file.write_bytes(CONTENTS[content](file.read_bytes()))
        for name, reader in READERS.items():
            check(f"{name} of {path}", path, reader, str(tmp_path), expected[name])
        shutil.rmtree(tmp_path / "a")


def pipe(file: Path) -> None:
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def hole(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


def folder(file: Path) -> None:
    file.mkdir()


NO_FILES = (pipe, endless, hole, folder)
# Parts of a task without a record. A listing of files has no folder in it: such a part is not there, and its groups are generated again.
UNRECORDED = "iterations/000002/rollouts/part-"


@pytest.mark.parametrize(
    ("put", "each"),
    [
        pytest.param(
            put,
            each,
            marks=[pytest.mark.slow] * (each or put in (hole, folder)),
            id=f"{put.__name__}{' in each' * each}",
        )
        for put in NO_FILES
        for each in (False, True)
    ],
)
def test_what_is_no_file_or_has_no_end_is_named_with_what_helps(
    stored: Path, tmp_path: Path, expected: dict[str, Any], put: Callable[[Path], None], each: bool
) -> None:
    """A reader waited for ever for a pipe, and took the memory of the host for what has no end. The rows are all files of the run."""
    place = NO_FILES.index(put)
    files = sorted(path.relative_to(stored).as_posix() for path in stored.rglob("*") if path.is_file())
    for number, path in enumerate(files):
        if not each and path != "run.json" and number % len(NO_FILES) != place:
            continue
        if put is folder and path.startswith(UNRECORDED):
            continue
        shutil.copytree(stored, tmp_path / "a")
        file = tmp_path / "a" / path
        file.unlink()
        put(file)
        for name, reader in READERS.items():
            check(f"{name} of {path}", path, reader, str(tmp_path), expected[name])
        shutil.rmtree(tmp_path / "a")


@pytest.mark.parametrize("closed", ["", "iterations", "lease"])
def test_a_run_that_can_be_read_and_not_written_is_read_and_its_start_is_refused_by_name(
    stored: Path, tmp_path: Path, expected: dict[str, Any], closed: str
) -> None:
    """A start ended with a traceback of a PermissionError."""
    shutil.copytree(stored, tmp_path / "a")
    places = list((tmp_path / "a" / closed).rglob("*"))
    for place in (*places, tmp_path / "a" / closed):
        place.chmod(0o500 if place.is_dir() else 0o400)
    with modes_hold():
        for name, reader in READERS.items():
            if name != "check":
                assert reader(str(tmp_path)) == expected[name], name
        refused = [line for line in problems(str(tmp_path)) if line not in expected["check"]]
        assert any(f"{tmp_path}/a" in line and "permissions" in line for line in refused), refused
        if closed != "iterations":
            with pytest.raises(StorageError, match=f"{tmp_path}/a.*cannot write.*permissions"):
                Lease.take(Store(str(tmp_path / "a")))
    for place in (tmp_path / "a" / closed, *places):
        place.chmod(0o700)


def check(case: str, path: str, reader: Callable[[str], Any], root: str, before: Any) -> None:
    """The reader names the file and a remedy, or reads what it read of the whole run."""
    found, refused = outcome(reader, root)
    if refused:
        assert path.rpartition("/")[2] in str(refused), case
        assert refused.remedy, case
    elif found != before:  # a list of problems, which names it
        new = [line for line in found if line not in before]
        assert any(path.rpartition("/")[2] in line for line in new), (case, new)
