"""What a run commits names it: a file of another run of the same name is noticed, whole and sealed as it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from millrace.connectors.storage.conditional import RUN, check_seal, sealed
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.errors import CorruptFileError, StorageError

RECORD = "results/rollout.json"


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A run of the id "ours" with one committed iteration and a record of the open one."""
    folder = RunFolder(str(tmp_path), "a")
    folder.store.write_sealed("run.json", {"id": "ours"})
    folder.commit_manifest(0, Manifest(iteration=0, files=[], run="ours"))
    write_record(folder, "ours")
    return str(tmp_path)


def write_record(folder: RunFolder, run: str | None) -> None:
    place = f"{folder.iteration_path(1)}/{RECORD}"
    folder.store.write_sealed(place, {"result": "{}"}, run=run)


def read(root: str) -> None:
    folder = RunFolder(root, "a")
    assert len(folder.manifests()) == 1
    assert IterationFiles(folder, 1).record("rollout") == {}


@pytest.mark.parametrize("record", [{"id": "another's"}, {}], ids=["another's", "an older one's"])
def test_run_json_of_another_run_is_named_beside_what_it_does_not_fit(
    root: str, record: dict[str, str]
) -> None:
    read(root)
    store = RunFolder(root, "a").store
    store.write_sealed("run.json", record)
    with pytest.raises(StorageError, match=r"000000/manifest\.json: is of another run than .*/a/run\.json"):
        read(root)
    with pytest.raises(StorageError, match=r"rollout\.json: is of another run than .*/a/run\.json"):
        IterationFiles(RunFolder(root, "a"), 1).record("rollout")


def test_a_record_or_manifest_of_another_run_is_named(root: str) -> None:
    folder = RunFolder(root, "a")
    write_record(folder, "another's")
    with pytest.raises(StorageError, match=r"000001/results/rollout\.json: is of another run"):
        read(root)
    other = Manifest(iteration=0, files=[], run="another's").sealed().model_dump_json()
    folder.iteration(0).write("manifest.json", other.encode())
    with pytest.raises(StorageError, match=r"000000/manifest\.json: is of another run"):
        read(root)


def test_a_branch_has_files_of_the_runs_that_it_comes_from(root: str) -> None:
    store = RunFolder(root, "a").store
    for record in ({"ancestors": ["first", "ours"]}, {"id": "new", "ancestors": ["ours"]}):
        store.write_sealed("run.json", record)
        read(root)


def test_a_driver_takes_its_own_files_before_run_json_has_its_id(root: str) -> None:
    folder = RunFolder(root, "a")
    folder.store.remove("run.json")
    read(root)  # whoever needs run.json names it
    folder.store.write_sealed("run.json", {})
    folder.owner.drive_as("ours")
    assert len(folder.manifests()) == 1


def test_what_earlier_releases_committed_names_no_run_and_is_read(root: str) -> None:
    folder = RunFolder(root, "a")
    content = Manifest(iteration=0, files=[]).model_dump(mode="json", exclude={"run", "before", "sha256"})
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    folder.iteration(0).write("manifest.json", json.dumps(content).encode())
    write_record(folder, None)
    read(root)


def test_the_run_is_part_of_what_a_seal_holds() -> None:
    whole = sealed({"a": 1}, "f", "ours")
    assert check_seal(whole, "/f") == {"a": 1}
    for changed in (
        {**whole, RUN: "another's"},
        {name: value for name, value in whole.items() if name != RUN},
        {"a": 1, RUN: "ours"},
    ):
        with pytest.raises(CorruptFileError):
            check_seal(changed, "/f")
