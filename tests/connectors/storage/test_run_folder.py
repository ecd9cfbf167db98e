"""RunFolder: what is committed counts, is final and is checked; what is not committed does not count."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.accounts.ledger import Ledger
from millrace.core.contracts import schema
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError

SAMPLES = 2


def test_a_run_is_itself_by_any_link_and_neither_its_copy_nor_its_namesake(tmp_path: Path) -> None:
    """Actors, placement groups, shared memory and temporary folders are named by the identity."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    one = RunFolder(str(tmp_path / "runs"), "a").identity("1")
    assert RunFolder(str(tmp_path / "link"), "a").identity("1") == one
    assert RunFolder(f"file://{tmp_path}/runs/", "a").identity("1") == one
    others = {
        "a copy under another root": RunFolder(str(tmp_path / "copies"), "a").identity("1"),
        "a copy of another name": RunFolder(str(tmp_path / "runs"), "b").identity("1"),
        "another run under another root": RunFolder(str(tmp_path / "other"), "a").identity("2"),
        "a run that took the place of a removed one": RunFolder(str(tmp_path / "runs"), "a").identity("2"),
        "a bucket": RunFolder("memory://runs", "a").identity("1"),
    }
    assert len({one, *others.values()}) == 1 + len(others)


def write_iteration(folder: RunFolder, index: int, ledger: Ledger) -> Manifest:
    """An iteration of four groups: kept, dropped, half kept, returned."""
    draws = ledger.draw(index, 3, 1)
    prompts, verdicts = [], []
    for draw in draws:
        group = f"g{index}-{draw.ordinal}"
        prompts.append(
            {
                "group_id": group,
                "prompt_id": f"p{draw.row}",
                "iteration": index,
                "source": draw.source,
                "row": draw.row,
                "epoch": draw.epoch,
                "ordinal": draw.ordinal,
                "prompt": '"a"',
                "prompt_tokens": [1],
                "label": None,
                "metadata": None,
            }
        )
        for sample in range(SAMPLES):
            verdict, reason = [
                ("kept", None),
                ("dropped", "zero variance"),
                [("dropped", "not scored"), ("kept", None)][sample],
                ("returned", None),
            ][draw.ordinal]
            verdicts.append(
                {
                    "sample_id": f"{group}-{sample}",
                    "group_id": group,
                    "prompt_id": f"p{draw.row}",
                    "verdict": verdict,
                    "reason": reason,
                    "train_step": 2 * index + 1 + sample if verdict == "kept" else None,
                }
            )
    store = folder.iteration(index)
    files = [
        store.write_table(f"{kind}.parquet", pa.Table.from_pylist(rows, schema=schema.schema(kind)), kind)
        for kind, rows in (("prompts", prompts), ("verdicts", verdicts))
    ]
    files.append(store.write_json("results/filter.json", {"kept": 2}))
    return Manifest(iteration=index, files=files, tasks={"metrics": {"reward/mean": 0.1}})


def new_ledger() -> Ledger:
    return Ledger(7, {"a": (1.0, 10)})


def committed(root: str, iterations: int) -> RunFolder:
    folder, ledger = RunFolder(root, "run"), new_ledger()
    for index in range(iterations):
        folder.commit_manifest(index, write_iteration(folder, index, ledger))
        ledger.extend(folder.history())
    return folder


def test_an_iteration_counts_once_its_manifest_is_there(root: str) -> None:
    folder, ledger = RunFolder(root, "run"), new_ledger()
    manifest = write_iteration(folder, 0, ledger)
    assert folder.manifests() == {}
    assert folder.first_open_iteration() == 0
    assert folder.verify(0) == [
        f"{folder.iteration(0).url_of('manifest.json')}: no such file; iteration 1 is not committed"
    ]
    folder.commit_manifest(0, manifest)
    fresh = RunFolder(root, "run")
    for reader in (folder, fresh):
        assert list(reader.manifests()) == [0]
        assert reader.first_open_iteration() == 1
        assert reader.manifests()[0].tasks == {"metrics": {"reward/mean": 0.1}}
        assert reader.verify(0) == []
    assert fresh.manifests()[0].file("prompts.parquet").rows == 4
    with pytest.raises(KeyError):
        fresh.manifests()[0].file("other")


def test_the_history_is_expressed_by_the_manifests_alone(root: str) -> None:
    folder = committed(root, 3)
    groups = [[(g.verdict, g.reason, g.steps) for g in history.groups()] for history in folder.history()]
    for index, found in enumerate(groups):
        step = 2 * index + 1
        assert found == [
            ("kept", None, [step, step + 1]),
            ("dropped", "zero variance", []),
            ("kept", None, [step + 1]),
            ("returned", None, []),
        ]
    again = RunFolder(root, "run")
    here, there = new_ledger().extend(folder.history()), new_ledger().extend(again.history())
    assert here.draw(3, 5, 5) == there.draw(3, 5, 5)
    assert here.counts == {"kept": 6, "dropped": 3, "returned": 3}


def test_many_iterations_are_found_in_order_and_an_open_one_after_them_does_not_count(root: str) -> None:
    folder = committed(root, 12)
    assert list(folder.manifests()) == list(range(12))
    folder.iteration(12).write("prompts.parquet", b"")
    again = RunFolder(root, "run")
    assert [manifest.iteration for manifest in again.manifests().values()] == list(range(12))
    assert again.first_open_iteration() == 12


def test_a_committed_iteration_is_never_overwritten(root: str) -> None:
    folder = committed(root, 1)
    manifest = folder.manifests()[0]
    before = folder.iteration(0).read("manifest.json")
    again = RunFolder(root, "run")
    again.commit_manifest(0, manifest.model_copy(update={"tasks": {"metrics": {"reward/mean": 0.2}}}))
    assert folder.iteration(0).read("manifest.json") == before
    with pytest.raises(StorageError, match=r"manifest\.json: iteration 1 is committed with other files"):
        again.commit_manifest(0, manifest.model_copy(update={"files": manifest.files[:1]}))
    assert folder.iteration(0).read("manifest.json") == before


def test_verify_names_every_file_that_is_missing_or_changed(root: str) -> None:
    folder = committed(root, 1)
    store = folder.iteration(0)
    assert folder.verify(0) == []
    data = bytearray(store.read("verdicts.parquet"))
    data[len(data) // 2] ^= 4
    store.write("verdicts.parquet", bytes(data))
    store.remove("results/filter.json")
    problems = folder.verify(0)
    assert len(problems) == 2
    assert "verdicts.parquet" in problems[0]
    assert "results/filter.json: no such file" in problems[1]


def test_a_bit_flipped_in_any_byte_of_any_committed_file_is_named(tmp_path: Path) -> None:
    folder = committed(str(tmp_path), 1)
    store = folder.iteration(0)
    for path in store.list():
        whole = store.read(path)
        for at in range(0, len(whole), max(1, len(whole) // 60)):
            broken = bytearray(whole)
            broken[at] ^= 1
            store.write(path, bytes(broken))
            problems = RunFolder(str(tmp_path), "run").verify(0)
            same_json = path.endswith("manifest.json") and _same_json(whole, bytes(broken))
            assert problems or same_json, f"{path}: byte {at} flipped unnoticed"
            assert all(path in problem for problem in problems)
        store.write(path, whole)
    assert RunFolder(str(tmp_path), "run").verify(0) == []


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_a_broken_manifest_is_named(root: str) -> None:
    folder = committed(root, 2)
    store = folder.iteration(1)
    whole = store.read("manifest.json")
    content = json.loads(whole)
    content["history"]["row"][0] += 1
    for broken, said in (
        (whole[:-40], "not JSON"),
        (json.dumps(content).encode(), "does not have the hash it names"),
        (b'{"schema_version": 1}', "not a manifest"),
        (b'{"schema_version": 99}', "schema version 99, wanted 1"),
        (b"[]", "not a manifest"),
    ):
        store.write("manifest.json", broken)
        with pytest.raises(CorruptFileError, match=rf"000001/manifest\.json: .*{said}"):
            RunFolder(root, "run").manifests()


def test_a_manifest_that_is_gone_from_the_middle_is_named(root: str) -> None:
    folder = committed(root, 3)
    folder.iteration(1).remove("manifest.json")
    with pytest.raises(
        MissingFileError, match=r"000001/manifest\.json: no such file, though the iteration was"
    ):
        RunFolder(root, "run").manifests()


def test_verdicts_that_leave_a_group_out_are_named(root: str) -> None:
    folder = RunFolder(root, "run")
    manifest = write_iteration(folder, 0, new_ledger())
    store = folder.iteration(0)
    short = store.read_table("verdicts.parquet", "verdicts").slice(SAMPLES)
    entry = store.write_table("verdicts.parquet", short, "verdicts")
    files = [entry if file.path == entry.path else file for file in manifest.files]
    with pytest.raises(CorruptFileError, match=r"verdicts\.parquet: has no verdict on the group"):
        folder.commit_manifest(0, manifest.model_copy(update={"files": files}))
    assert folder.manifests() == {}


def test_checkpoints_count_when_their_marker_is_there_and_not_while_they_are_removed(root: str) -> None:
    folder = RunFolder(root, "run")
    assert folder.complete_checkpoints() == []
    for done in (10, 2, 20):
        folder.store.write(f"{folder.checkpoint_path(done)}/shard", b"s")
        if done != 20:
            folder.store.write_json(f"{folder.checkpoint_path(done)}/complete.json", {})
    assert folder.complete_checkpoints() == [2, 10]
    folder.remove_checkpoint(2)
    folder.remove_checkpoint(2)
    assert folder.complete_checkpoints() == [10]
    assert folder.store.list("checkpoints") == [
        "checkpoints/000010/complete.json",
        "checkpoints/000010/shard",
        "checkpoints/000020/shard",
    ]


def test_cleaning_removes_what_interrupted_writes_left_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = committed(str(tmp_path), 1)
    before = folder.store.list()
    left = tmp_path / "run" / "iterations" / "000000" / ".aside-left"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    assert folder.clean() == ["iterations/000000/.aside-left"]
    assert "an interrupted write left it" in caplog.text
    assert folder.store.list() == before
    assert not left.exists()
