"""`millrace ledger`: every token of a stored run is accounted for, and what keeps an account from closing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.errors import StorageError
from millrace.flows.commands import app
from millrace.tasks.batching.credited import check_closes, stored_account
from tests.support.stored_run import write_run


def ledger(root: Path, *options: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["ledger", "a", "--root", str(root), *options])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return write_run(str(tmp_path))


def test_iterations_that_are_committed_and_the_open_one_are_accounted_for(
    run: RunFolder, tmp_path: Path
) -> None:
    shown = json.loads(ledger(tmp_path, "--json"))
    first, second, opened = shown["rows"]
    rollouts = IterationFiles(run, 0).read_parts("rollouts")
    by_source = {
        source: pc.sum(
            rollouts.filter(pc.equal(rollouts.column("source"), source)).column("response_length")
        ).as_py()
        for source in ("sums", "chats")
    }
    for row in (first, second):
        assert (row["trained"], row["dropped"]) == (by_source["sums"], by_source["chats"])
        assert row["generated"] == row["trained"] + row["dropped"]
    assert (opened["in flight"], opened["trained"]) == (opened["generated"], 0)
    assert [row["closes"] for row in shown["rows"]] == ["yes"] * 3
    assert shown["dropped by"] == f"zero_variance {2 * by_source['chats']:,}"


def test_one_iteration_is_shown_by_fate_cause_and_version(run: RunFolder, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = json.loads(ledger(tmp_path, "--at", "2", "--json"))["rows"]
    assert {(row["fate"], row["dropped_by"]) for row in rows} == {
        ("trained", ""),
        ("dropped", "zero_variance"),
    }
    assert {row["version"] for row in rows} == {1}
    assert "ask for 1 <= at <= 3" in ledger(tmp_path, "--at", "4", code=2)


def without_a_verdict(run: RunFolder) -> None:
    """The second iteration's manifest again, over verdicts that lack a sample."""
    store, manifest = run.iteration(1), run.manifest(1)
    assert manifest is not None
    verdicts = store.read_table("verdicts.parquet", "verdicts")
    entry = store.write_table("verdicts.parquet", verdicts.slice(1), "verdicts")
    files = [entry if file.path == "verdicts.parquet" else file for file in manifest.files]
    store.remove("manifest.json")
    run.commit_manifest(1, manifest.model_copy(update={"files": files}))


def test_an_account_that_does_not_close_ends_with_one_and_names_the_iteration(
    run: RunFolder, tmp_path: Path
) -> None:
    without_a_verdict(run)
    run = RunFolder(str(tmp_path), "a")
    said = ledger(tmp_path, code=1)
    assert "iteration 2: " in said
    assert "iteration 1: " not in said
    assert "without one verdict" in said
    with pytest.raises(StorageError, match="the account of iteration 2 does not close") as error:
        check_closes(stored_account(IterationFiles(run, 1)), IterationFiles(run, 1), run)
    assert "millrace verify a" in str(error.value)
