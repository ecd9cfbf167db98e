"""A project in a folder of its own, started from elsewhere and then from within: its modules and files are found, and it is one run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.flow_runs import Workplace, configuration
from tests.support.own_functions import LOSS, REWARD, assert_trained_by_them


def project_of(workplace: Workplace, folder: Path) -> Path:
    """A folder with data, a model, two modules and a configuration that names them as they lie beside it."""
    folder.mkdir()
    shutil.copytree(workplace.folder / "model", folder / "model")
    shutil.copy(workplace.folder / "train.jsonl", folder)
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "my_losses.py").write_text(LOSS)
    values: dict[str, Any] = configuration()
    values["run"]["iterations"] = 1
    values["rollout"]["prompts"] = 4
    values["reward"]["function"] = "my_rewards:score"
    values["algorithm"]["loss"] = {"kind": "function", "function": "my_losses:loss"}
    del values["evaluation"]
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder


@pytest.mark.slow
def test_a_project_is_trained_from_elsewhere_and_goes_on_from_within(
    workplace: Workplace, tmp_path: Path
) -> None:
    project, root = project_of(workplace, tmp_path / "project"), f"storage.root={tmp_path / 'runs'}"
    out = workplace.call("train", str(project / "run.yaml"), root)
    assert "1 iterations complete, 1 of them now" in out
    within = Workplace(project)
    within.environment = workplace.environment
    out = within.call("train", "run.yaml", root, "run.iterations=2")
    assert "2 iterations complete, 1 of them now" in out
    run = tmp_path / "runs" / "a"
    assert_trained_by_them(run, 2)
    fields = {
        item["field"]
        for span in json.loads((run / "run.json").read_text())["changes"]
        for item in span["changes"]
    }
    assert {"run.iterations", "model.path"} <= fields
