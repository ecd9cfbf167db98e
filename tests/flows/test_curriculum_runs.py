"""Runs whose prompts follow the policy: levels, pools, stages, rows read as they are drawn; and after a kill the same ones."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.flow_runs import Workplace, configuration, final_weights, wait_until
from tests.support.growing_rows import growing_rows
from tests.support.metric_names import unexplained


def project(workplace: Workplace, folder: Path) -> Workplace:
    """A configuration beside a module with rows."""
    folder.mkdir()
    (folder / "growing.py").write_text(growing_rows(every=5))
    for name in ("model", "held_out.jsonl"):
        (folder / name).symlink_to(workplace.folder / name)
    rows = [json.dumps({"prompt": f"{n}-1=", "label": str(n - 1)}) for n in range(1, 7)]
    (folder / "few.jsonl").write_text("\n".join([*rows, '{"prompt": " ", "label": "x"}', "{"]))
    values = configuration()
    values["data"] |= {
        "stream_above_rows": 0,
        "sources": [
            {
                "name": "growing",
                "rows": "growing:sums",
                "levels": {"last": 6, "window": 2, "raise_from": 0.01, "groups": 3},
            },
            {"name": "few", "path": "few.jsonl", "pools": {"solved_from": 0.4, "unsolved_to": 0.05}},
        ],
        "stages": [
            {"weights": {"growing": 1}, "iterations": 1},
            {"weights": {"growing": 1, "few": 1}},
        ],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    made = Workplace(folder)
    made.environment = workplace.environment
    return made


@pytest.fixture(scope="module")
def place(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return project(workplace, tmp_path_factory.mktemp("curriculum") / "project")


@pytest.fixture(scope="module")
def whole(place: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    assert "3 iterations complete, 3 of them now" in place.train(root)
    return root / "a"


def tables(run: Path, name: str) -> list[list[dict[str, Any]]]:
    paths = sorted((run / "iterations").glob(f"*/{name}.parquet"))
    return [pq.read_table(path).to_pylist() for path in paths]


@pytest.mark.slow
def test_levels_rise_stages_change_and_unusable_rows_are_dropped(place: Workplace, whole: Path) -> None:
    prompts, verdicts = tables(whole, "prompts"), tables(whole, "verdicts")
    first, *later = prompts
    assert {row["source"] for row in first} == {"growing"}
    assert all({row["source"] for row in drawn} == {"growing", "few"} for drawn in later)
    highest = [max(row["level"] for row in drawn if row["source"] == "growing") for drawn in prompts]
    assert highest[0] == 0
    assert highest[-1] > 0
    metrics = [
        json.loads(path.read_text())["tasks"]["metrics"]
        for path in sorted((whole / "iterations").glob("*/manifest.json"))
    ]
    assert [found["curriculum/stage"] for found in metrics] == [0.0, 1.0, 1.0]
    reached = [found["curriculum/growing/level"] for found in metrics]
    assert reached[0] == 0.0
    assert reached[-1] > 0.0
    assert all(level >= drawn for level, drawn in zip(reached, highest, strict=True))
    assert "curriculum/few/level" not in metrics[-1], "a source without levels has no level"
    assert [name for found in metrics for name in unexplained(found)] == []
    assert all(row["level"] is None for drawn in prompts for row in drawn if row["source"] == "few")
    reasons = {row["group_id"]: (row["verdict"], row["reason"]) for judged in verdicts for row in judged}
    unusable = [row for drawn in prompts for row in drawn if row["unusable"] is not None]
    assert {row["source"] for row in unusable} == {"growing", "few"}
    for row in unusable:
        assert reasons[row["group_id"]] == ("dropped", f"unusable row: {row['unusable']}")
        assert row["source"] == "few" or "KeyError: 'row " in row["unusable"]
    kept = [len({row["group_id"] for row in judged if row["verdict"] == "kept"}) for judged in verdicts]
    assert kept == [8, 8, 8], "an unusable row takes no place in the batch"
    shown = place.call(
        "sql", "a", "select distinct level from prompts order by 1", "--root", str(whole.parent)
    )
    assert "level" in shown
    assert "nothing is wrong" in place.call("verify", "a", "--root", str(whole.parent))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["2/filter/in", "1/sample_prompts/in"])
def test_after_a_kill_the_same_prompts_are_drawn_and_the_same_weights_made(
    place: Workplace, whole: Path, tmp_path: Path, point: str
) -> None:
    reached = tmp_path / "reached"
    environment = {"MILLRACE_KILL_POINT": point, "MILLRACE_KILL_POINT_FILE": str(reached)}
    process = place.start("train", "run.yaml", f"storage.root={tmp_path}", **environment)
    wait_until(lambda: reached.exists() or process.poll() is not None)
    assert reached.exists(), process.communicate()[0]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    place.train(tmp_path)
    run = tmp_path / "a"
    assert tables(run, "prompts") == tables(whole, "prompts")
    assert tables(run, "verdicts") == tables(whole, "verdicts")
    assert final_weights(run) == final_weights(whole)
    assert "nothing is wrong" in place.call("verify", "a", "--root", str(tmp_path))
