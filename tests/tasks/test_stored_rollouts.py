"""Another run's iteration, copied as far as its filter: whole after any kill, and nothing that its manifest does not name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.parts import PART_FOLDERS, list_parts, take_over_parts, write_part
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.errors import CorruptFileError, StorageError
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.stored_rollouts import TASKS, take_rollouts
from millrace.tasks.runtime.runtime import Runtime
from tests.support.stored_run import CONFIG, write_run


@pytest.fixture
def source(tmp_path: Path) -> RunFolder:
    """The run `a`: the first iteration of a stored run, its samples in two parts, with records."""
    written = write_run(str(tmp_path / "written")).iteration(0)
    folder = RunFolder(str(tmp_path), "a")
    store = folder.iteration(0)
    (part,) = list_parts(written, "rollouts")
    rows = written.read_table(part, "rollouts")
    entries = [write_part(store, "rollouts", rows.slice(at, 2), "rollouts") for at in (0, 2)]
    entries.append(
        store.write_table("prompts.parquet", written.read_table("prompts.parquet", "prompts"), "prompts")
    )
    (scores,) = list_parts(written, "rewards")
    entries.append(write_part(store, "rewards", written.read_table(scores, "rewards"), "rewards"))
    for task in TASKS:
        record = {"result": json.dumps({"files": [entry.record() for entry in entries]})}
        store.write_sealed(record_path(task), record, place=f"iterations/000000/{record_path(task)}")
        entries.append(store.entry(record_path(task)))
    entries.append(store.write_json("step.json", {}))
    folder.store.write_sealed("run.json", {"id": "one"})
    folder.commit_manifest(0, Manifest(iteration=0, files=entries))
    return folder


def context(source: RunFolder, index: int = 0) -> IterationContext:
    root = str(Path(source.store.url).parent)
    values = {**CONFIG, "run": {"name": "b"}, "pipeline": {"rollouts_from": "a"}, "storage": {"root": root}}
    config = RunConfig.model_validate({**values, "evaluation": {}})
    return IterationContext(Runtime(config), index)


def take(ctx: IterationContext) -> None:
    asyncio.run(take_rollouts.fn(ctx))


def test_all_that_comes_before_the_filter_is_copied_and_no_more(source: RunFolder) -> None:
    ctx = context(source)
    take(ctx)
    named = [entry.path for entry in source.manifest(0).files if entry.path != "step.json"]  # type: ignore[union-attr]
    assert sorted(ctx.folder.list()) == sorted(named)
    assert set(ctx.records) == set(TASKS)


def test_parts_that_are_copied_after_a_start_has_taken_over_count(source: RunFolder) -> None:
    ctx = context(source)
    first, second = list_parts(source.iteration(0), "rollouts")
    ctx.folder.write(first, source.iteration(0).read(first))
    take_over_parts(ctx.folder, PART_FOLDERS, token=2)
    take(ctx)
    assert list_parts(ctx.folder, "rollouts") == [first, second]
    assert len(list_parts(ctx.folder, "rewards")) == 1


def test_what_is_there_is_kept_and_what_changed_is_copied_again(source: RunFolder) -> None:
    ctx = context(source)
    take(ctx)
    first, second = (Path(ctx.folder.url) / path for path in list_parts(ctx.folder, "rollouts"))
    first.write_bytes(b"not a table")
    before = second.stat().st_mtime_ns
    take(context(source))
    assert pq.read_table(first).num_rows == 2
    assert second.stat().st_mtime_ns == before


def test_a_file_that_is_not_as_it_was_committed_is_refused_by_name(source: RunFolder) -> None:
    path = list_parts(source.iteration(0), "rewards")[0]
    (Path(source.iteration(0).url) / path).write_bytes(b"not a table")
    with pytest.raises(CorruptFileError, match=path.split("/")[1][:20]):
        take(context(source))


def test_an_iteration_that_is_not_stored_is_named(source: RunFolder) -> None:
    with pytest.raises(StorageError, match="has not stored iteration 2"):
        take(context(source, index=1))


def test_one_without_a_record_is_refused(source: RunFolder, tmp_path: Path) -> None:
    store = RunFolder(str(tmp_path / "older"), "a")
    entry = store.iteration(0).write_json("step.json", {})
    store.commit_manifest(0, Manifest(iteration=0, files=[entry]))
    with pytest.raises(StorageError, match="no record of rollout"):
        take(context(store))
