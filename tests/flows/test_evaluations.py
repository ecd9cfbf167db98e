"""Evaluations of real runs: killed half-way, and made again from stored weights by `millrace eval`."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from millrace.flows.commands import app
from tests.soak.promises import finished
from tests.support.flow_runs import Workplace, final_weights, wait_until

ROWS = ["set", "prompt_id", "index", "prompt", "label", "response", "reward", "scoring", "version", "subset"]


def evaluated(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file, columns=ROWS).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_and_answers_nothing_again(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    log, reached = tmp_path / "finished.log", tmp_path / "reached"
    process = workplace.start(
        "train",
        "run.yaml",
        f"storage.root={tmp_path / 'killed'}",
        "rollout.part_groups=1",
        MILLRACE_KILL_POINT="1/evaluate/in",
        MILLRACE_KILL_POINT_FILE=str(reached),
        MILLRACE_FINISHED_LOG=str(log),
    )
    wait_until(lambda: reached.exists() or process.poll() is not None)
    assert reached.exists(), process.communicate()[0]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    run = tmp_path / "killed" / "a"
    parts = list((run / "iterations" / "000001" / "evaluations").glob("part-*.parquet"))
    kept = {(row["prompt_id"], row["index"]) for part in parts for row in evaluated(part)}
    assert 0 < len(kept) <= 10
    before = len(finished(log))
    out = workplace.train(tmp_path / "killed", "rollout.part_groups=1", MILLRACE_FINISHED_LOG=str(log))
    assert "3 iterations complete, 2 of them now" in out
    again = {rid.split("~")[0] for rid in finished(log)[before:] if rid.startswith("eval-4-")}
    assert not again & {f"eval-4-{prompt}-{index}" for prompt, index in kept}
    for done in (0, 2, 3):
        file = f"eval/held_out/{done:06d}.parquet"
        assert evaluated(run / file) == evaluated(whole / file)
    assert final_weights(run) == final_weights(whole)
    verdict = workplace.call("verify", "a", "--root", str(tmp_path / "killed"))
    assert "nothing is wrong" in verdict
    assert "no manifest names" not in verdict


@pytest.mark.parametrize(
    "done",
    [
        pytest.param(0, marks=pytest.mark.slow, id="the model"),
        pytest.param(2, marks=pytest.mark.slow, id="a checkpoint"),
        pytest.param(3, marks=pytest.mark.slow, id="an export"),
    ],
)
def test_a_stored_run_answers_as_it_did(workplace: Workplace, whole: Path, tmp_path: Path, done: int) -> None:
    root, before = str(whole.parent), sorted(path for path in whole.rglob("*") if path.is_file())
    said = workplace.call("eval", "a", "--root", root, "--at", str(done), "--out", str(tmp_path / "rows"))
    assert f"a, {done} iterations trained" in said
    rows = evaluated(tmp_path / "rows" / f"held_out-{done:06d}.parquet")
    assert rows == evaluated(whole / "eval" / "held_out" / f"{done:06d}.parquet")
    assert sorted(path for path in whole.rglob("*") if path.is_file()) == before


def test_a_folder_answers_the_sets_of_a_configuration_with_pass_at_k_and_subsets(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1), "metadata": {"level": "ab"[n % 2]}} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [
        {
            "name": "sums",
            "path": str(tmp_path / "sums.jsonl"),
            "samples_per_prompt": 4,
            "subset_key": "level",
            "sampling": {"max_new_tokens": 8, "temperature": 1.0},
        },
        {"name": "other", "path": "held_out.jsonl"},
    ]
    (export,) = (whole / "exports").iterdir()
    said = workplace.call(
        *("eval", str(export), f"evaluation.sets={json.dumps(sets)}", "--config", "run.yaml"),
        *("--set", "sums", "--out", str(tmp_path / "rows"), "--json"),
    )
    found = evaluated(tmp_path / "rows" / "sums-000000.parquet")
    assert not (tmp_path / "rows" / "other-000000.parquet").exists()
    assert Counter(row["subset"] for row in found) == {"a": 12, "b": 12}
    (shown,) = [row for row in json.loads(said[said.index("[") :]) if row["set"] == "sums"]
    assert shown["reward"] == pytest.approx(sum(row["reward"] for row in found) / 24)
    assert {"pass@1", "pass@2", "pass@4", "majority", "± 95 %"} <= shown.keys()
    assert '"sums/a"' in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--at", "9"], "ask for 0 <= at <= 3"),
        (["a", "--set", "helf_out"], "there are: held_out"),
        (["a", "run.seed=1"], "a run is evaluated as it was configured"),
        (["model"], "give --config FILE with evaluation.sets"),
        (["nothing"], "there is no run of this name"),
        (["model", "--config", "run.yaml", "--against", "1"], "a folder has one state of the weights"),
        (["a", "--against", "9"], "ask for 0 <= at <= 3"),
        (["model", "evaluation.sets=[]", "--config", "run.yaml"], "there are no held-out sets"),
    ],
)
def test_what_cannot_be_evaluated_is_named_with_a_remedy(
    workplace: Workplace, whole: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(workplace.folder)
    monkeypatch.setenv("MILLRACE_HOME", workplace.environment["MILLRACE_HOME"])
    said = CliRunner().invoke(app, ["eval", *arguments, "--root", str(whole.parent)])
    assert said.exit_code == 2
    assert message in " ".join(said.output.split())
