"""A run that is ahead of its trainer has several open iterations: what reads a run sees all of them, and checks them alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.manifests.manifest import JOINED
from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.run_folder import CUT, DEFERRED, RunFolder, open_iterations
from millrace.core.errors import CorruptFileError
from millrace.flows.commands.branch import branch_run
from millrace.flows.commands.ledger import accounts_of_run
from millrace.flows.commands.sql import answer
from millrace.flows.commands.verify import verify_run
from millrace.flows.driver.stored_run import ahead_of, run_record
from tests.support.stored_run import write_run

AHEAD = 3  # index of the iteration beyond the first open one


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Two iterations are committed, two are open; the second of those has what runs that defer groups have."""
    folder = write_run(str(tmp_path))
    path = Path(folder.store.root) / "iterations"
    shutil.copytree(path / "000002", path / f"{AHEAD:06d}")
    ahead = folder.iteration(AHEAD)
    prompts = ahead.read_table("prompts.parquet", "prompts")
    rollouts = read_parts(ahead, "rollouts", "rollouts")
    made = [ahead.entry("prompts.parquet"), ahead.write(CUT, b"the cut")]
    made += [ahead.write_table(JOINED, prompts, "prompts"), ahead.write_table(DEFERRED, rollouts, "rollouts")]
    files = [entry.record() for entry in made]
    ahead.write_sealed(record_path("sample_prompts"), {"result": json.dumps({"files": files, "groups": 2})})
    held = {"path": "p", "size": 1, "sha256": "", "rows": 1, "usable": 1, "usable_sha256": ""}
    record = folder.store.read_sealed("run.json")
    data = [{"since": 0, "sources": dict.fromkeys(("sums", "chats"), held)}]
    folder.store.write_sealed("run.json", {**record, "data": data})
    return folder


def root(folder: RunFolder) -> str:
    return str(Path(folder.store.root).parent)


def test_files_of_later_open_iterations_are_no_strangers(folder: RunFolder) -> None:
    assert open_iterations(folder) == [2, AHEAD]
    verdict = verify_run(root(folder), "a")
    assert verdict.open_iterations == [2, AHEAD]
    assert [path for path in verdict.strangers if path.startswith("iterations/00000")] == []
    folder.iteration(AHEAD).write("new.json", b"")
    assert f"iterations/{AHEAD:06d}/new.json" in verify_run(root(folder), "a").strangers


@pytest.mark.parametrize("name", ["prompts.parquet", CUT, DEFERRED, JOINED])
def test_a_changed_file_of_a_later_open_iteration_is_named(folder: RunFolder, name: str) -> None:
    """Only the first open iteration was looked at."""
    store = folder.iteration(AHEAD)
    before = verify_run(root(folder), "a").problems
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    store.write(name, bytes(data))
    (problem,) = set(verify_run(root(folder), "a").problems) - set(before)
    assert f"iterations/{AHEAD:06d}/{name}" in problem
    if name == "prompts.parquet":
        with pytest.raises(CorruptFileError, match=f"iterations/{AHEAD:06d}/{name}"):
            answer(root(folder), "a", "select * from prompts")


def test_tables_and_the_ledger_have_the_rows_of_every_open_iteration(folder: RunFolder) -> None:
    found = answer(root(folder), "a", "select count(*) from samples where not committed").rows
    assert [tuple(row) for row in found] == [(8,)]  # of both, which hold the same rows here
    shutil.rmtree(Path(folder.iteration(AHEAD).root))
    found = answer(root(folder), "a", "select count(*) from samples where not committed").rows
    assert [tuple(row) for row in found] == [(4,)]


def test_the_ledger_accounts_for_every_open_iteration(folder: RunFolder) -> None:
    listing = accounts_of_run(root(folder), "a").listing
    assert [row[0] for row in listing.rows] == [1, 2, 3, 4]
    folder.iteration(AHEAD).write(DEFERRED, b"no table")
    with pytest.raises(CorruptFileError, match=f"iterations/{AHEAD:06d}/{DEFERRED}"):
        accounts_of_run(root(folder), "a")


def test_a_branch_keeps_how_far_ahead_its_parent_was(folder: RunFolder) -> None:
    """Its first iterations were drawn before those before them were trained; the branch's ledger took them for others."""
    store = folder.store
    shard = store.write("checkpoints/000002/shard", b"weights")
    files = [{**shard.record(), "path": "shard"}]
    store.write_sealed("checkpoints/000002/complete.json", {"version": 2, "files": files})
    spans = [{"since": 1, "iterations": 1}, {"since": 2, "iterations": 0}]
    store.write_sealed("run.json", {**store.read_sealed("run.json"), "ahead": spans})
    branch_run(root(folder), "a", "b", 2)
    record = run_record(root(folder), "b")
    assert record["ahead"] == spans[:1]
    assert [ahead_of(record).at(index) for index in range(4)] == [0, 1, 1, 1]
    assert ahead_of(record).since(2, 0).spans == ((1, 1), (2, 0))  # as its first start has it
