"""run.json of a run from before the configuration's shape changed: listed, shown, branched and resumed as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.config.reading.stored import VERSION
from millrace.core.errors import ConfigError
from millrace.flows.driver.same_run import check_resume, stored_config
from millrace.flows.tools.branch import branch_run
from millrace.flows.tools.browse import run_listing, run_record, runs_listing, settings_of

STORED = Path(__file__).parents[1] / "core" / "config" / "version_1.json"
SAME = """
run: {name: old, prepare: "millrace.flows.quickstart:prepare"}
model: {path: m}
data: {sources: [{path: moved.jsonl}]}
"""


@pytest.fixture
def root(tmp_path: Path) -> str:
    config: dict[str, Any] = json.loads(STORED.read_text())["config"]
    config["run"]["name"] = "old"
    record = {"name": "old", "config": config, "mlflow_run_id": None, "attempts": [], "data": []}
    RunFolder(str(tmp_path), "old").store.write_sealed("run.json", record)
    return str(tmp_path)


def test_it_is_listed_and_shown(root: str) -> None:
    assert len(runs_listing(root).rows) == 1
    shown = run_listing(root, "old")
    assert shown.facts["run"] == "old"
    assert shown.rows == []


def test_the_same_configuration_continues_it_and_another_does_not(root: str) -> None:
    before = settings_of(run_record(root, "old"))
    config = load_config(None, text=SAME)
    check_resume(stored_config(before, "old"), config)
    other = load_config(None, ["algorithm.loss.clip_high=0.3"], text=SAME)
    with pytest.raises(ConfigError, match="algorithm.loss.clip_high: was 0.2, now 0.3"):
        check_resume(stored_config(before, "old"), other)


def test_its_branch_has_a_parent_of_todays_shape(root: str) -> None:
    branch_run(root, "old", "new", 0)
    stored = json.loads((Path(root) / "new" / "run.json").read_text())
    assert stored["config_version"] == VERSION
    assert RunConfig.model_validate(settings_of(stored)).algorithm.loss.kind == "clipped"
