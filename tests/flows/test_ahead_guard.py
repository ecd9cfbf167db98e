"""What is decided of how far ahead a run may be stands in run.json before a draw, and is decided alike by another process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.run_folder import DRAWN, RunFolder
from millrace.core.accounts.staleness import Ahead
from millrace.core.config import RunConfig
from millrace.flows.driver.iteration_slots import lower_ahead
from millrace.flows.driver.stored_run import ahead_of
from millrace.tasks.runtime.prompts import Prompts

LOW, GOOD = 0.2, 0.9


def config_of(root: Path, min_ess: float | None = 0.5) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "a"},
            "model": {"path": "m"},
            "data": {"sources": [{"path": "p"}]},
            "storage": {"root": str(root)},
            "algorithm": {"correction": {"kind": "truncate"}},
            "pipeline": {"ahead": 1, "min_ess": min_ess},
        }
    )


def started(root: Path, ahead: Ahead = Ahead(((0, 1),)), min_ess: float | None = 0.5) -> Any:
    """What a driver has of the run once run.json is written."""
    config, folder = config_of(root, min_ess), RunFolder(str(root), "a")
    prompts = Prompts(config, folder)
    prompts.use_ahead(ahead)
    return SimpleNamespace(config=config, run_folder=folder, prompts=prompts)


def commit(folder: RunFolder, *ess: float) -> None:
    """Commit an iteration for each effective sample size."""
    first = folder.first_open_iteration()
    for index, value in enumerate(ess, first):
        metrics = {"train/ess": value, "train/importance_ess": LOW}
        folder.commit_manifest(index, Manifest(iteration=index, files=[], tasks={"metrics": metrics}))


def recorded(folder: RunFolder) -> Ahead:
    return ahead_of(folder.store.read_sealed("run.json"))


async def test_a_decision_is_written_before_it_holds_and_only_from_what_is_committed_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = started(tmp_path)
    folder = driver.run_folder
    folder.store.write_sealed("run.json", {"name": "a", "ahead": [{"since": 0, "iterations": 1}]})
    commit(folder, GOOD, LOW, LOW)
    await lower_ahead(driver, 4)
    assert driver.prompts.ahead == recorded(folder) == Ahead(((0, 1),))
    commit(folder, LOW)
    await lower_ahead(
        driver, 4
    )  # iteration 3 may be open while 4 is drawn: whether it is committed must not matter
    assert driver.prompts.ahead.at(4) == 1
    await lower_ahead(driver, 5)
    assert driver.prompts.ahead == recorded(folder) == Ahead(((0, 1), (5, 0)))
    assert folder.store.read_sealed("run.json")["name"] == "a"
    assert "from iteration 6 on 0 may be open ahead, not 1" in caplog.text
    commit(folder, GOOD, GOOD, GOOD, GOOD)
    await lower_ahead(driver, 8)
    assert driver.prompts.ahead.at(8) == 0, "it is not taken back"


async def test_another_process_decides_the_same_and_what_is_drawn_keeps_its_setting(tmp_path: Path) -> None:
    first = started(tmp_path)
    first.run_folder.store.write_sealed("run.json", {"ahead": [{"since": 0, "iterations": 1}]})
    commit(first.run_folder, LOW, LOW, LOW)
    killed_before = started(tmp_path)  # had not decided yet, and finds more committed
    await lower_ahead(first, 4)
    commit(first.run_folder, GOOD)
    await lower_ahead(killed_before, 4)
    assert killed_before.prompts.ahead == first.prompts.ahead == recorded(first.run_folder)
    after = started(tmp_path, recorded(first.run_folder))
    await lower_ahead(after, 4)
    assert after.prompts.ahead == first.prompts.ahead
    drawn = started(tmp_path)
    drawn.run_folder.iteration(4).write_json(DRAWN, {})
    await lower_ahead(drawn, 4)
    assert drawn.prompts.ahead == Ahead(((0, 1),))


async def test_without_a_bound_nothing_is_decided(tmp_path: Path) -> None:
    driver = started(tmp_path, min_ess=None)
    commit(driver.run_folder, LOW, LOW, LOW, LOW)
    await lower_ahead(driver, 5)
    assert driver.prompts.ahead == Ahead(((0, 1),))
    assert not driver.run_folder.store.exists("run.json")
