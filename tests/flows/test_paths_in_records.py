"""Paths that a stored run names lead to files of the run: every reader refuses any other, and writes nothing outside.

`eval` and `branch` wrote wherever a record said, and a name in a bucket led out of the folder that it was copied to.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace.connectors.storage.checkpoint_files import checkpoint_files
from millrace.connectors.storage.files import FileEntry, recorded
from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.run_folder import COMPLETE, MANIFEST, RECORD, RunFolder
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.megatron.conversion.sources import TorchDistSource
from millrace.core.errors import ConfigError, StorageError
from millrace.core.families.architecture import architecture
from millrace.core.families.tensors import weight_tensors
from millrace.core.families.weight_files import INDEX
from millrace.flows.commands.branch import branch_run
from millrace.flows.commands.named_files import check_file, named_by_records
from millrace.flows.commands.replay import export_folder
from millrace.flows.commands.verify import Verdict, _checkpoint, _open_iteration, _problems_of_records
from tests.support.stored_run import write_run

BAD = {
    "absolute": "{outside}/planted",
    "up": "../../../../outside/planted",
    "up and down again": "rollouts/../../../../../outside/planted",
    "nothing between slashes": "rollouts//planted",
    "the folder itself": "./planted",
    "another system's": "..\\planted",
    "no name": "",
}
CONTENT = b"x"
HASH = hashlib.sha256(CONTENT).hexdigest()
HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
OPEN = 2  # of the run that is read: its iterations 0 and 1 are committed


def entry(path: str) -> dict[str, Any]:
    """A record's entry of a file that holds CONTENT."""
    return {**FileEntry(path="x", sha256=HASH, size=1).record(), "path": path}


def record(run: RunFolder, task: str, result: dict[str, Any]) -> None:
    run.iteration(OPEN).write_sealed(record_path(task), {"metadata": {}, "result": json.dumps(result)})


def in_a_manifest(run: RunFolder, path: str) -> None:
    manifest = run.manifest(0)
    assert manifest
    files = [*manifest.files, FileEntry.model_construct(**entry(path))]
    run.store.write_json(
        f"{run.iteration_path(0)}/{MANIFEST}",
        manifest.model_copy(update={"files": files}).sealed().model_dump(mode="json"),
    )


def in_a_tasks_record(run: RunFolder, path: str) -> None:
    record(run, "rollout", {"files": [entry(path)]})


def in_a_draws_pictures(run: RunFolder, path: str) -> None:
    record(run, "sample_prompts", {"files": [], "images": [entry(path)]})


def in_an_evaluations_pictures(run: RunFolder, path: str) -> None:
    record(run, "evaluate", {"files": [], "sets": {}, "images": [entry(path)]})


def in_an_evaluations_record(run: RunFolder, path: str) -> None:
    record(run, "evaluate", {"sets": {"easy": {"file": entry(path)}}})


def in_an_exports_record(run: RunFolder, path: str) -> None:
    record(run, "checkpoint", {"exported": "exports/000003", "export_files": [entry(path)]})


def as_the_folder_of_an_export(run: RunFolder, path: str) -> None:
    record(run, "checkpoint", {"exported": path, "export_files": [entry("config.json")]})


def in_a_checkpoints_marker(run: RunFolder, path: str) -> None:
    folder = run.store.child(run.checkpoint_path(1))
    folder.write_sealed(COMPLETE, {"version": 1, "files": [entry(path)]})


def in_the_runs_record(run: RunFolder, path: str) -> None:
    run.store.write_sealed(RECORD, {**run.store.read_sealed(RECORD), "quarantine": entry(path)})


def verified(run: RunFolder, into: Path) -> None:
    """verify names it as a problem: those of its parts that read paths, since the run's samples are not made by training."""
    verdict = Verdict(open_iterations=[OPEN])
    problems = [*run.verify(0), *_open_iteration(run, OPEN)]
    list(_problems_of_records(run, run.store.read_sealed(RECORD), verdict))
    problems += [
        *verdict.problems,
        *(line for done in run.complete_checkpoints() for line in _checkpoint(run, done)),
    ]
    if problems:
        raise StorageError("; ".join(problems))


def branched(run: RunFolder, into: Path) -> None:
    root = str(Path(run.store.root).parent)
    if not run.complete_checkpoints():
        run.store.child(run.checkpoint_path(1)).write_sealed(COMPLETE, {"version": 1, "files": []})
    try:
        branch_run(root, "a", "b", 1)
    finally:
        assert not Store(f"{root}/b").exists(RECORD)


def converted(run: RunFolder, into: Path) -> None:
    model = Path(run.store.root) / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HF))
    TorchDistSource(Path(run.store.root) / run.checkpoint_path(1), model)


Plant = Callable[[RunFolder, str], None]
Read = Callable[[RunFolder, Path], object]
READERS: dict[str, tuple[Plant, Read]] = {
    "train and replay, of an iteration": (in_a_manifest, lambda run, _: IterationFiles(run, 0).entries),
    "verify, of an iteration": (in_a_manifest, verified),
    "branch, of an iteration": (in_a_manifest, branched),
    "train, of an open iteration": (in_a_tasks_record, lambda run, _: IterationFiles(run, OPEN).entries),
    "verify, of an open iteration": (in_a_tasks_record, verified),
    "verify, of an evaluation": (in_an_evaluations_record, verified),
    "branch, of an evaluation": (
        in_an_evaluations_record,
        lambda run, _: list(named_by_records(run, OPEN)),
    ),
    "verify, of a draw's pictures": (in_a_draws_pictures, verified),
    "branch, of a draw's pictures": (in_a_draws_pictures, lambda run, _: list(named_by_records(run, OPEN))),
    "verify, of an evaluation's pictures": (in_an_evaluations_pictures, verified),
    "eval and replay, of an export": (in_an_exports_record, lambda run, into: export_folder(run, 3, into)),
    "verify, of an export": (in_an_exports_record, verified),
    "verify, of an export's folder": (as_the_folder_of_an_export, verified),
    "sql, of a file by its name": (
        in_an_exports_record,
        lambda run, _: check_file(Path(run.store.root) / "exports" / "000003" / "config.json"),
    ),
    "train, of a checkpoint": (
        in_a_checkpoints_marker,
        lambda run, _: recorded(
            run.store.child(run.checkpoint_path(1)).read_sealed(COMPLETE)["files"], "marker"
        ),
    ),
    "verify, of a checkpoint": (in_a_checkpoints_marker, verified),
    "branch, of a checkpoint": (in_a_checkpoints_marker, branched),
    "replay, of a checkpoint": (in_a_checkpoints_marker, lambda run, _: checkpoint_files(run, 1)),
    "convert, of a checkpoint": (in_a_checkpoints_marker, converted),
    "verify, of quarantined rows": (in_the_runs_record, verified),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(write_run(str(tmp_path_factory.mktemp("written"))).store.root)
    (folder / "exports" / "000003").mkdir(parents=True)
    (folder / "exports" / "000003" / "config.json").write_bytes(CONTENT)
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> RunFolder:
    """A run, below folders that a path upward leads to."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "planted").write_bytes(CONTENT)
    shutil.copytree(written, tmp_path / "runs" / "a")
    return RunFolder(str(tmp_path / "runs"), "a")


def around(run: RunFolder, into: Path) -> dict[str, bytes]:
    """Every file below the test's folder that is not the run's or the reader's."""
    root = Path(run.store.root).parents[1]
    return {
        str(path): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.is_relative_to(run.store.root) and not path.is_relative_to(into)
    }


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("reader", READERS)
def test_a_path_that_leads_elsewhere_is_refused(
    run: RunFolder, tmp_path: Path, reader: str, bad: str
) -> None:
    plant, read = READERS[reader]
    into = tmp_path / "into"
    plant(run, BAD[bad].format(outside=tmp_path / "outside"))
    before = around(run, into)
    with pytest.raises(StorageError):
        read(RunFolder(str(tmp_path / "runs"), "a"), into)
    assert {name: text for name, text in around(run, into).items() if "/b/" not in name} == before
    assert not into.exists()


def a_file_by_a_link(run: RunFolder, outside: Path) -> None:
    at = Path(run.store.root) / "exports" / "000003" / "config.json"
    at.unlink()
    at.symlink_to(outside / "planted")
    in_an_exports_record(run, "config.json")
    in_a_checkpoints_marker(run, "shard")
    (Path(run.store.root) / run.checkpoint_path(1) / "shard").symlink_to(outside / "planted")


def a_folder_by_a_link(run: RunFolder, outside: Path) -> None:
    for name in (f"exports/{OPEN + 1:06d}", run.checkpoint_path(1)):
        linked = Path(run.store.root) / name
        if linked.exists():
            (linked / "config.json").unlink()
            linked.rmdir()
        linked.parent.mkdir(parents=True, exist_ok=True)
        linked.symlink_to(outside)
    (outside / "config.json").write_bytes(CONTENT)
    in_an_exports_record(run, "config.json")
    Store(str(outside)).write_sealed(
        COMPLETE, {"version": 1, "files": [entry("planted")]}, place=f"{run.checkpoint_path(1)}/{COMPLETE}"
    )


@pytest.mark.parametrize("plant", [a_file_by_a_link, a_folder_by_a_link])
@pytest.mark.parametrize(
    "read",
    [
        verified,
        branched,
        lambda run, into: export_folder(run, 3, into),
        lambda run, _: (
            run.store.url_of(run.checkpoint_path(1)) and run.store.child(run.checkpoint_path(1)).read("shard")
        ),
    ],
    ids=["verify", "branch", "eval and replay", "train"],
)
def test_a_link_out_of_the_runs_folder_is_refused(
    run: RunFolder, tmp_path: Path, plant: Callable[[RunFolder, Path], None], read: Read
) -> None:
    plant(run, tmp_path / "outside")
    with pytest.raises(StorageError, match="by a link, out of the run's folder"):
        read(RunFolder(str(tmp_path / "runs"), "a"), tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_a_run_is_not_written_through_a_link_either(run: RunFolder, tmp_path: Path) -> None:
    (Path(run.store.root) / "iterations" / "000005").symlink_to(tmp_path / "outside")
    for write in (
        lambda: RunFolder(str(tmp_path / "runs"), "a").iteration(5).write_json("cut.json", {}),
        lambda: RunFolder(str(tmp_path / "runs"), "a").store.write("iterations/000005/cut.json", b"{}"),
    ):
        with pytest.raises(StorageError, match="by a link"):
            write()
    assert not (tmp_path / "outside" / "cut.json").exists()


@pytest.mark.parametrize("name", ["../../planted", "/../planted", "sub/../../planted", "a//b", "..\\planted"])
def test_names_in_a_bucket_lead_nowhere_but_below_the_folder_they_are_copied_to(
    tmp_path: Path, name: str
) -> None:
    """A bucket's names are no paths: they may hold anything."""
    store = Store("memory://paths-in-records/run")
    store.write("exports/config.json", CONTENT)
    try:
        with pytest.raises(StorageError, match="leads out of|is no path of a file"):
            store.download_dir("exports", str(tmp_path / "into"), ["config.json", name])
        if ".." not in name.split("/"):  # which no Store writes
            store.write(f"exports/{name}", CONTENT)
            with pytest.raises(StorageError, match="is no path of a file"):
                store.download_dir("exports", str(tmp_path / "into"))
    finally:
        store.remove("", recursive=True)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad != "no name"])
def test_the_index_of_a_models_weights_names_files_beside_it(tmp_path: Path, bad: str) -> None:
    named = BAD[bad].format(outside=tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": named}}))
    with pytest.raises(ConfigError, match="is no path of a file below its folder"):
        weight_tensors(str(tmp_path), architecture(HF), "model.path")


# The modules that read entries of files from what is stored; each is a reader above, or has its entries from one.
READ_ENTRIES = {
    "connectors/trainers/megatron/conversion/sources.py": "convert, of a checkpoint",
    "connectors/trainers/checkpoint/trainer_state.py": "train, of a checkpoint",
    "connectors/storage/checkpoint_files.py": "branch, of a checkpoint",
    "connectors/storage/iteration_files.py": "train, of an open iteration",
    "flows/commands/named_files.py": "verify, of an export",
    "flows/commands/replay.py": "eval and replay, of an export",
    "flows/commands/verify.py": "verify, of quarantined rows",
    "tasks/context.py": "train, of an open iteration",
    "tasks/publish.py": "train, of an open iteration",
    "tasks/run_recorded.py": "train, of an open iteration",
    "tasks/shards/driver.py": "train, of an open iteration",
}


def test_every_reader_of_entries_asks_where_they_lead() -> None:
    root = Path(millrace.__file__).parent
    calls: dict[str, set[str]] = {}
    for folder in ("core", "connectors", "tasks", "flows"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    starred = "**" if any(word.arg is None for word in node.keywords) else ""
                    calls.setdefault(f"{ast.unparse(node.func)}{starred}", set()).add(
                        path.relative_to(root).as_posix()
                    )
    assert calls["recorded"] == set(READ_ENTRIES)
    assert set(READ_ENTRIES.values()) <= set(READERS)
    assert calls["FileEntry.model_validate"] == {"connectors/storage/files.py"}
    assert "FileEntry**" not in calls
