"""A reward that raises for some samples: the run stops with the reason, and goes on once the function is corrected."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.flows.test_own_files import project_of
from tests.support.flow_runs import Workplace

RAISES = """
def score(sample):
    if len(sample.response) % 4 == 3:
        return float(sample.metadata["points"])
    return 0.25 if len(sample.response) % 2 else 0.75
"""
CORRECTED = """
def score(sample):
    return 0.5 if len(sample.response) % 4 == 3 else 0.125
"""


def rewards(run: Path) -> dict[str, dict[str, Any]]:
    """Rows of the first iteration's reward parts, by sample; none is there twice."""
    parts = [pq.read_table(path).to_pylist() for path in (run / "iterations/000000/rewards").iterdir()]
    rows = {row["sample_id"]: row for part in parts for row in part}
    assert len(rows) == sum(map(len, parts))
    return rows


@pytest.mark.slow
def test_the_same_command_goes_on_after_a_reward_that_raised_was_corrected(
    workplace: Workplace, tmp_path: Path
) -> None:
    project, root = project_of(workplace, tmp_path / "project"), tmp_path / "runs"
    command = ("train", str(project / "run.yaml"), f"storage.root={root}", "run.name=raises")
    command = (*command, "algorithm.loss=clipped", "rollout.prompts=8")
    (project / "my_rewards.py").write_text(RAISES)
    out = " ".join(workplace.call(*command, expect=2, COLUMNS="2000").split())
    told = re.search(
        r"iteration 1: (\d+) samples could not be scored, more than reward.max_failed_share = 0.1 allows \(3 of 32\); most "
        r"often: KeyError: 'points' in my_rewards.py, line 4 \((\d+) of \1, such as sample (\S+)\); correct my_rewards:score",
        out,
    )
    assert told, out
    assert told[1] == told[2] == "4"  # the first that is one too many ends it
    of_iteration = {"flow_runs": {"name": {"any_": ["raises, iteration 1"]}}}
    tasks = workplace.ask("/task_runs/filter", of_iteration)
    assert {task["name"].partition("-")[0]: task["run_count"] for task in tasks}["reward"] == 1
    before = rewards(root / "raises")
    assert before[told[3]]["scoring"] == "failed"
    query = "select scoring, reason, count(*) as n from rewards group by all order by n desc"
    shown = workplace.call("sql", "raises", query, "--root", str(root), "--json")
    outcomes = {row["scoring"]: row for row in json.loads(shown)}
    assert outcomes["failed"] == {
        "scoring": "failed",
        "reason": "KeyError: 'points' in my_rewards.py, line 4",
        "n": 4,
    }
    assert outcomes["scored"]["n"] == len(before) - 4

    (project / "my_rewards.py").write_text(CORRECTED)
    out = workplace.call(*command)
    assert "4 samples could not be scored and are scored again" in out
    assert "1 iterations complete, 1 of them now" in out
    after = rewards(root / "raises")
    assert len(after) == 32
    for sample, row in after.items():
        first = before.get(sample)
        if first and first["scoring"] == "scored":
            assert row == first
        else:
            assert row["reward"] in ((0.5,) if first else (0.5, 0.125))
    assert "nothing is wrong" in workplace.call("verify", "raises", "--root", str(root))
