"""discard: an iteration that is not committed is given up, and what it made stays aside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.connectors.storage.lease import Lease, LeaseHeldError
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import VERSION
from millrace.core.errors import StorageError
from millrace.flows.commands.discard import discard_iterations
from millrace.flows.driver.stored_run import run_record
from tests.support.flow_runs import Workplace, configuration, trained

GOES = (
    "checkpoints/000002/complete.json",
    "checkpoints/000002/shard",
    "exports/000002/model.safetensors",
    "eval/held_out/000002.parquet",
    "iterations/000001/results/filter.json",
    "iterations/000001/prompts.parquet",
    "iterations/000001/rollouts/part.parquet",
)
STAYS = (
    "checkpoints/000001/complete.json",
    "checkpoints/strange/file",
    "eval/held_out/000000.parquet",
    "eval/held_out/note.txt",
    "iterations/000000/batch.parquet",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with one committed iteration and one that is open; no Ray head runs in its MILLRACE_HOME."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    folder = RunFolder(str(tmp_path), "a")
    config = RunConfig.model_validate(configuration()).model_dump(mode="json")
    folder.store.write_sealed(
        "run.json",
        {"name": "a", "config": config, "config_version": VERSION, "attempts": []},
    )
    folder.commit_manifest(0, Manifest(iteration=0, files=[]))
    for path in (*GOES, *STAYS):
        folder.store.write(path, path.encode())
    return folder


def discard(folder: RunFolder, number: int, *, later: bool = False) -> str:
    root = str(Path(folder.store.root).parent)
    return discard_iterations(root, "a", number - 1, later=later, reason="an engine was broken")


def test_what_the_iteration_made_is_moved_aside_with_the_reason_and_nothing_else(folder: RunFolder) -> None:
    line = discard(folder, 2)
    (moved,) = folder.store.folders("discarded")
    assert f"discarded/{moved}" in line
    aside = f"discarded/{moved}/"
    for path in GOES:
        assert folder.store.read(f"{aside}{path}") == path.encode()
    here = {path for path in folder.store.list() if not path.startswith((aside, "lease/"))}
    assert here == {*STAYS, "run.json", "iterations/000000/manifest.json"}
    assert folder.store.read_sealed(f"{aside}reason.json")["reason"] == "an engine was broken"
    record = run_record(str(Path(folder.store.root).parent), "a")
    assert [item["iteration"] for item in record["discarded"]] == [2]
    assert folder.complete_checkpoints() == [1]
    assert folder.first_open_iteration() == 1


def test_a_committed_iteration_is_refused_and_the_branch_that_goes_on_without_it_is_named(
    folder: RunFolder,
) -> None:
    with pytest.raises(
        StorageError, match=r"iteration 1 is committed.*`millrace branch a NEW --at 0 --root \S+`"
    ):
        discard(folder, 1)
    folder.commit_manifest(1, Manifest(iteration=1, files=[]))
    with pytest.raises(
        StorageError, match=r"iteration 2 is committed.*`millrace branch a NEW --at 1 --root \S+`"
    ):
        discard(folder, 2)
    folder.store.remove("iterations/000000/manifest.json")
    with pytest.raises(StorageError, match="an iteration after iteration 1 is committed"):
        discard(folder, 1, later=True)


def test_later_iterations_go_only_when_asked_for(folder: RunFolder) -> None:
    folder.store.write("iterations/000002/prompts.parquet", b"")
    with pytest.raises(StorageError, match=r"`millrace discard a --from 2 --root \S+`"):
        discard(folder, 2)
    with pytest.raises(StorageError, match="iteration 9 was not begun; the open iteration is 2"):
        discard(folder, 9)
    discard(folder, 2, later=True)
    assert folder.store.list("iterations") == [
        "iterations/000000/batch.parquet",
        "iterations/000000/manifest.json",
    ]


def test_the_first_iteration_takes_the_evaluation_before_it_along(folder: RunFolder) -> None:
    folder.store.remove("iterations/000000/manifest.json")
    discard(folder, 1, later=True)
    assert folder.store.list("eval") == ["eval/held_out/note.txt"]


def test_a_run_that_is_driven_is_left_alone(folder: RunFolder) -> None:
    lease = Lease.take(folder.store)
    before = folder.store.list()
    with pytest.raises(LeaseHeldError):
        discard(folder, 2)
    assert folder.store.list() == before
    lease.release()
    discard(folder, 2)


@pytest.mark.slow
def test_a_tripped_guard_names_discard_and_after_it_the_run_goes_on(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    short = ("run.iterations=1", "evaluation.every=9")
    out = workplace.train(tmp_path, *short, "sync.max_logprob_gap=1e-12", expect=2, COLUMNS="400")
    assert f"`millrace discard a --from 1 --root {tmp_path}`" in out
    out = workplace.call(
        "discard", "a", "--iteration", "1", "--reason", "gap", "--root", str(tmp_path), COLUMNS="300"
    )
    assert "groups are in the ledger again" in out
    assert not (tmp_path / "a" / "iterations" / "000000" / "prompts.parquet").exists()
    assert "1 iterations complete, 1 of them now" in workplace.train(tmp_path, *short)
    assert trained(tmp_path / "a") == trained(whole)[:32]
    assert json.loads((tmp_path / "a" / "run.json").read_text())["discarded"][0]["reason"] == "gap"
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", str(tmp_path))
