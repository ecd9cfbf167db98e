"""A run folder of many iterations: what a driver keeps of each is small, and it draws what it always drew."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.manifests.summaries import has_summary
from millrace.connectors.storage.run_folder import READ_AHEAD, RunFolder
from millrace.core.accounts.history import GroupOutcome, IterationHistory
from millrace.core.accounts.ledger import Ledger
from millrace.core.errors import CorruptFileError, MissingFileError

ITERATIONS = (
    1000  # some thousands are as many times as slow, and tell no more: what is held is a bound per iteration
)
FEW = 3 * READ_AHEAD + 7
VERDICTS = ("kept", "dropped", "returned", "kept")
KEPT_BYTES = 512  # of an iteration, at most, in whatever reads all of them


def new_ledger() -> Ledger:
    return Ledger(7, {"a": (1.0, 50), "b": (2.0, 9)})


def write_manifests(root: Path, count: int) -> Ledger:
    """Manifests of iterations of four groups, with their summaries, and the ledger that drew them."""
    ledger, before, summaries = new_ledger(), None, RunFolder(str(root), "run").summaries
    for index in range(count):
        outcomes = [
            GroupOutcome(
                **vars(draw),
                verdict=VERDICTS[draw.ordinal],
                reason="zero variance" if draw.ordinal == 1 else None,
                steps=[index + 1] if VERDICTS[draw.ordinal] == "kept" else [],
            )
            for draw in ledger.draw(index, 3, 1)
        ]
        history = IterationHistory.of(index, outcomes)
        files = [
            FileEntry(path=f"rollouts/part-{number}.parquet", sha256="0" * 64, size=9) for number in range(8)
        ]
        if has_summary(index):
            files.append(summaries.write(index))
        tasks = {"metrics": {f"train/figure_{number}": index / 7 for number in range(20)}}
        manifest = Manifest(iteration=index, files=files, tasks=tasks, history=history).after(before).sealed()
        folder = root / "run" / "iterations" / f"{index:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps(manifest.model_dump(mode="json")))
        ledger.apply(history)
        before = manifest
    return ledger


@pytest.mark.slow
def test_what_is_kept_of_an_iteration_is_small(tmp_path: Path) -> None:
    """It was every manifest, some 30 KiB each: a driver of thousands of iterations grew by as much."""
    write_manifests(tmp_path, ITERATIONS)
    folder, ledger = RunFolder(str(tmp_path), "run"), new_ledger()
    RunFolder(str(tmp_path), "run").manifest(0)  # what is loaded once
    gc.collect()
    tracemalloc.start()
    ledger.extend(folder.history())
    gc.collect()
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert folder.first_open_iteration() == ITERATIONS
    assert kept < KEPT_BYTES * ITERATIONS
    assert most < KEPT_BYTES * ITERATIONS + READ_AHEAD * 2**17  # a few manifests at a time


def state(ledger: Ledger) -> dict[str, object]:
    return {
        "counts": ledger.counts,
        "dropped": ledger.dropped,
        "drawn": ledger.drawn(),
        "returned": ledger.returned,
        "next": ledger.draw(ledger.next_iteration, 40, 9),
    }


def test_the_ledger_is_the_same_however_the_manifests_are_read(tmp_path: Path) -> None:
    root, drew = tmp_path, write_manifests(tmp_path, FEW)
    folder = RunFolder(str(root), "run")
    whole = list(folder.history())

    def in_pieces() -> Iterable[IterationHistory]:
        for since in range(0, FEW, 70):
            yield from list(RunFolder(str(root), "run").history(since))[:70]

    manifests = RunFolder(str(root), "run").manifests()
    assert list(manifests) == list(range(FEW))
    of_all_at_once = [manifest.history for manifest in manifests.values() if manifest.history]
    for history in (whole, folder.history(), in_pieces(), of_all_at_once):
        assert state(new_ledger().extend(history)) == state(drew)
    assert whole == of_all_at_once
    twice = new_ledger().extend(whole)
    assert state(twice.extend(folder.history())) == state(drew)  # what is applied is not applied again
    assert [history.iteration for history in folder.history(FEW - 3)] == list(range(FEW - 3, FEW))


def test_a_manifest_that_is_read_again_must_be_the_one_that_was_read(tmp_path: Path) -> None:
    write_manifests(tmp_path, 5)
    folder = RunFolder(str(tmp_path), "run")
    assert folder.first_open_iteration() == 5
    assert folder.manifest(4) is folder.manifest(4)  # the newest stays
    path = tmp_path / "run" / "iterations" / "000002" / "manifest.json"
    whole = path.read_text()
    other = Manifest.model_validate_json(whole).model_copy(update={"tasks": {"metrics": {}}}).sealed()
    path.write_text(other.model_dump_json())
    for read in (lambda: folder.manifest(2), lambda: list(folder.history()), folder.manifests):
        with pytest.raises(CorruptFileError, match="000002.*is not the manifest that was read before"):
            read()
    path.unlink()
    with pytest.raises(MissingFileError, match="000002"):
        folder.manifest(2)
    with pytest.raises(MissingFileError, match="000002"):
        list(folder.history())
    path.write_text(whole)
    assert folder.manifests() == RunFolder(str(tmp_path), "run").manifests()
