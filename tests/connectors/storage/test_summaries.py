"""Summaries of manifests: a start reads few files, and finds what the manifests say, whatever became of a summary."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stored_iterations
from benchmarks.stored_iterations import StubRun
from millrace.connectors.storage import files, run_folder
from millrace.connectors.storage.iteration_files import commit_again
from millrace.connectors.storage.manifests import summaries
from millrace.connectors.storage.manifests.summaries import SUMMARY, Committed
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.errors import CorruptFileError, MissingFileError
from millrace.flows.commands.verify import verify_run
from tests.support.slow_members import slow_but

FEW = 4  # iterations of a summary here


@pytest.fixture(autouse=True)
def every_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "EVERY", FEW)
    monkeypatch.setattr(run_folder, "EVERY", FEW)


def write_run(root: Path, iterations: int) -> StubRun:
    run = StubRun(str(root), "a")
    for index in range(iterations):
        run.iterate(index)
    return run


def of_manifests(root: Path) -> list[Committed]:
    return [Committed.of(manifest) for manifest in RunFolder(str(root), "a").manifests().values()]


def operations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Storage operations from now on, by verb."""
    found: Counter[str] = Counter()
    plain = files.retried

    def counted(verb: str, *args: Any, **options: Any) -> Any:
        found[verb] += 1
        return plain(verb, *args, **options)

    monkeypatch.setattr(files, "retried", counted)
    return found


@pytest.mark.parametrize("iterations", slow_but([3, 4, 5, 8, 9, 14, 17], 3, 9))
def test_a_fresh_reader_finds_what_the_manifests_say(tmp_path: Path, iterations: int) -> None:
    write_run(tmp_path, iterations)
    folder = RunFolder(str(tmp_path), "a")
    assert folder.first_open_iteration() == iterations
    assert list(folder.committed()) == of_manifests(tmp_path)
    for since in range(iterations + 1):
        fresh = RunFolder(str(tmp_path), "a")
        assert list(fresh.committed(since)) == of_manifests(tmp_path)[since:]
        assert list(folder.history(since)) == [item.history for item in of_manifests(tmp_path)[since:]]
    assert verify_run(str(tmp_path), "a").strangers == []


def test_a_start_reads_a_file_for_some_iterations_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a manifest for each of them, several times."""
    write_run(tmp_path, 42)
    found = operations(monkeypatch)
    folder = RunFolder(str(tmp_path), "a")
    assert folder.first_open_iteration() == 42
    assert found["read"] <= 42 / FEW + FEW + 2
    found.clear()
    list(folder.history(since=42))
    assert found["read"] + found["list"] <= 1, "a driver asks this every iteration"


def test_a_figure_that_is_no_number_is_summed_up_as_manifests_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_iterations, "METRICS", 1)
    monkeypatch.setattr(stored_iterations, "FIGURE", float("nan"))
    write_run(tmp_path, 6)
    found = [sorted(item.metrics.items()) for item in RunFolder(str(tmp_path), "a").committed()]
    assert repr(found) == repr([sorted(item.metrics.items()) for item in of_manifests(tmp_path)])
    assert verify_run(str(tmp_path), "a").problems == []


def test_a_later_iteration_is_seen_by_who_read_the_earlier_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path, 6)
    reader = RunFolder(str(tmp_path), "a")
    assert reader.first_open_iteration() == 6
    run.iterate(6)
    assert reader.first_open_iteration() == 7
    run.iterate(7)
    run.iterate(8)
    assert [item.iteration for item in reader.committed(5)] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("number", "damage"),
    slow_but(product([4, 8], ["gone", "changed", "no JSON"]), (8, "gone"), (4, "changed"), (4, "no JSON")),
)
def test_what_a_summary_lost_is_read_from_the_manifests(tmp_path: Path, number: int, damage: str) -> None:
    write_run(tmp_path, 11)
    path = tmp_path / "a" / "iterations" / f"{number:06d}" / SUMMARY
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(path.read_text().replace("0.1", "0.2") if damage == "changed" else "{")
    folder = RunFolder(str(tmp_path), "a")
    assert list(folder.committed()) == of_manifests(tmp_path)
    assert folder.first_open_iteration() == 11
    assert any(SUMMARY in problem for problem in verify_run(str(tmp_path), "a").problems)


def test_a_summary_that_another_manifest_names_does_not_count(tmp_path: Path) -> None:
    """Whoever writes a summary and its hash into a manifest breaks the chain of manifests."""
    write_run(tmp_path, 7)
    folder = RunFolder(str(tmp_path), "a")
    manifest = folder.manifest(4)
    assert manifest is not None
    entry = folder.iteration(4).write(SUMMARY, b'{"before": {}, "iterations": []}')
    others = [file for file in manifest.files if file.path != SUMMARY]
    forged = manifest.model_copy(update={"files": [*others, entry]}).sealed()
    folder.iteration(4).write("manifest.json", forged.model_dump_json().encode())
    with pytest.raises(CorruptFileError):
        list(RunFolder(str(tmp_path), "a").committed())


def test_a_manifest_is_checked_against_the_summary_that_was_read(tmp_path: Path) -> None:
    write_run(tmp_path, 7)
    folder = RunFolder(str(tmp_path), "a")
    assert folder.first_open_iteration() == 7
    other = folder.manifest(1)
    assert other is not None
    changed = other.model_copy(update={"tasks": {"metrics": {}}}).sealed()
    folder.iteration(1).write("manifest.json", changed.model_dump_json().encode())
    with pytest.raises(CorruptFileError, match="000001"):
        folder.manifest(1)
    assert verify_run(str(tmp_path), "a").problems


def test_a_missing_newer_manifest_is_still_found(tmp_path: Path) -> None:
    write_run(tmp_path, 8)
    (tmp_path / "a" / "iterations" / "000006" / "manifest.json").unlink()
    with pytest.raises(MissingFileError, match="000006"):
        RunFolder(str(tmp_path), "a").first_open_iteration()


def test_a_manifest_with_a_summary_is_made_again_as_it_was(tmp_path: Path) -> None:
    write_run(tmp_path, 9)
    place = tmp_path / "a" / "iterations" / "000008"
    before = (place / "manifest.json").read_bytes(), (place / SUMMARY).read_bytes()
    (place / "manifest.json").unlink()
    (place / SUMMARY).unlink()
    assert commit_again(RunFolder(str(tmp_path), "a")) == [8]
    assert ((place / "manifest.json").read_bytes(), (place / SUMMARY).read_bytes()) == before


def test_a_run_whose_first_summaries_an_earlier_release_did_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(summaries, "EVERY", 1000)
        run = write_run(tmp_path, 6)
    for index in range(6, 14):
        run.iterate(index)
    assert list(RunFolder(str(tmp_path), "a").committed()) == of_manifests(tmp_path)
    assert RunFolder(str(tmp_path), "a").summaries.until == 0
