"""`millrace plan CONFIG --from RUN` on a run that was trained, and what it refuses."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError, StorageError
from millrace.flows.commands import app
from millrace.flows.commands.plan import recorded_run
from tests.support.flow_runs import Workplace
from tests.support.stored_run import CONFIG, write_run


def test_in_turns_on_its_own_layout_a_run_takes_the_time_that_was_measured(
    workplace: Workplace, whole: Path
) -> None:
    said = workplace.call("plan", "run.yaml", "--from", "a", "--root", str(whole.parent), COLUMNS="200")
    measured, replayed = map(float, re.findall(r"([0-9.]+) s an iteration, replayed ([0-9.]+) s", said)[0])
    assert replayed == pytest.approx(measured, rel=0.1)
    assert [line[:6] for line in said.splitlines() if "asynchrony" in line or "difference" in line] == [
        "2 GPUs",
        "4 GPUs",
    ]


def test_every_layout_and_pipeline_is_a_row(workplace: Workplace, whole: Path) -> None:
    said = workplace.call(
        "plan", "run.yaml", "pipeline.ahead=3", "--from", "a", "--root", str(whole.parent), "--csv"
    )
    rows = list(csv.DictReader(io.StringIO(said)))
    found = {(row["layout"], row["gpus"], row["ahead"], row["max_staleness"], row["select"]) for row in rows}
    shared = {("0", "0", "draw"), ("0", "1", "finish")}
    split = {
        ("0", "0", "draw"),
        ("1", "1", "draw"),
        ("1", "2", "finish"),
        ("2", "2", "draw"),
        ("3", "3", "draw"),
    }
    assert found == {
        *(("colocated", gpus, *mode) for gpus in "124" for mode in shared),
        *(
            (layout, str(int(layout[0]) + int(layout[-1])), *mode)
            for layout in ("1 + 1", "3 + 1", "2 + 2")
            for mode in split
        ),
    }
    assert all(float(row["iteration_s"]) > 0 for row in rows)
    assert all(float(row["age_max"]) <= float(row["max_staleness"]) for row in rows)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"algorithm": {"loss": "sft"}}, "algorithm.loss = sft"),
        ({"rollout": {"session": {"function": "a:b"}}}, "rollout.session"),
        ({"rollout": {"buffer": {}}}, "rollout.buffer"),
        ({"pipeline": {"ahead": 1}}, "pipeline.ahead = 1"),
        ({"pipeline": {"eager": True}}, "pipeline.eager"),
        ({"pipeline": {"select": "finish", "max_staleness": 1}}, "pipeline.select = finish"),
        (
            {"evaluation": {"background": True, "sets": [{"name": "held", "path": "h.jsonl"}]}},
            "evaluation.background",
        ),
    ],
)
def test_a_run_whose_phases_cannot_be_told_apart_is_refused(
    sections: dict[str, Any], named: str, tmp_path: Path
) -> None:
    values = {**CONFIG, **{name: {**CONFIG.get(name, {}), **fields} for name, fields in sections.items()}}
    with pytest.raises(ConfigError, match=re.escape(named)):
        recorded_run(RunConfig.model_validate(values), write_run(str(tmp_path)))


def test_a_run_with_too_few_iterations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="0 iterations follow another one of the same driver"):
        recorded_run(RunConfig.model_validate(CONFIG), RunFolder(str(tmp_path), "none"))


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "run: {name: a}\nmodel: {path: m}\ndata: {sources: [{path: x.jsonl}]}\n"
    )
    result = CliRunner().invoke(
        app, ["plan", str(tmp_path / "run.yaml"), "--from", "none", "--root", str(tmp_path)]
    )
    assert result.exit_code == 2
