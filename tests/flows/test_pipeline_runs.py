"""Runs ahead of the trainer and with deferred groups: ages within their bound, accounts that close, and runs that repeat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.soak import forms, promises
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import Workplace, final_weights, wait_until
from tests.support.shard_runs import IN_SHARDS
from tests.support.slow_engines import setting, slow_engines

STEPS = 2  # of an iteration


@pytest.fixture(scope="module")
def tailed(workplace: Workplace) -> Workplace:
    """The workplace with sums whose answers are of very different lengths."""
    (workplace.folder / forms.TAILED).write_text(forms.tailed_rows())
    return workplace


def batches(run: Path) -> list[list[dict[str, Any]]]:
    columns = ["sample_id", "iteration", "policy_versions", "response_length", "rollout_logprobs"]
    paths = sorted(run.glob("iterations/*/batch.parquet"))
    return [pq.read_table(path, columns=columns).to_pylist() for path in paths]


def ages(run: Path) -> list[int]:
    """The age of each trained sample's oldest token, in published versions."""
    return [
        index - min(span["version"] for span in row["policy_versions"]) // STEPS
        for index, rows in enumerate(batches(run))
        for row in rows
        if row["policy_versions"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("where", [(), IN_SHARDS], ids=["driver", "shards"])
@pytest.mark.parametrize("name", ["sent_again", "deferred_ahead", "retracted", "deferred"])
def test_no_token_is_too_old_each_is_accounted_for_and_the_run_is_its_own_replay(
    tailed: Workplace, tmp_path: Path, name: str, where: tuple[str, ...]
) -> None:
    form = forms.FORMS[name]
    ahead = form.settings.get("pipeline.ahead", 0)
    bound = form.settings.get("pipeline.max_staleness", ahead)
    tailed.train(tmp_path, *forms.overrides(name), *where, "run.iterations=4")
    run = tmp_path / "a"
    assert form.at_work(run), "no token is older than the weights that it trains"
    assert max(ages(run)) <= bound
    for rows in batches(run):
        for row in rows:
            starts = [span["first_token"] for span in row["policy_versions"]]
            assert len(row["rollout_logprobs"]) == row["response_length"]
            assert starts == sorted(set(starts))
            assert not starts or starts[0] == 0
    assert not promises.faulted_by_commands(tailed, run)
    assert not promises.replayed(tailed, run)
    if "deferred" in name:
        listing = tailed.call("ledger", "a", "--root", str(tmp_path))
        assert "deferred  " in listing
        assert list(run.glob("iterations/*/deferred.parquet"))


@pytest.mark.slow
def test_with_one_version_an_iteration_two_runs_are_equal_however_late_the_engine_answers(
    tailed: Workplace, tmp_path: Path
) -> None:
    overrides = [*forms.overrides("ahead"), "run.iterations=4"]
    tailed.train(tmp_path / "one", *overrides)
    serving = embedded_engine(tailed.folder / "model", log=tmp_path / "engine.log")
    with serving as (url, _), slow_engines([url], "late") as slow:
        tailed.train(tmp_path / "other", *overrides, setting(slow))
    one, other = tmp_path / "one" / "a", tmp_path / "other" / "a"
    assert slow[0].answered
    assert max(ages(one)) == 1
    assert not promises.different_numbers(one, other)
    assert final_weights(one) == final_weights(other)


@pytest.mark.slow
def test_how_far_ahead_a_run_is_may_change_when_it_goes_on(tailed: Workplace, tmp_path: Path) -> None:
    """Iterations that were drawn keep what they were drawn under; groups that were deferred are trained first."""
    deferring = [*forms.overrides("deferred_ahead"), "checkpoint.every=1"]
    tailed.train(tmp_path, *deferring, "run.iterations=2")
    plain = [text for text in forms.overrides("deferred_ahead") if not text.startswith("pipeline.")]
    tailed.train(tmp_path, *plain, "checkpoint.every=1", "run.iterations=4")
    assert not promises.faulted_by_commands(tailed, tmp_path / "a")
    last = batches(tmp_path / "a")[-1]
    assert {row["iteration"] for row in last} == {3}
    assert "deferred" not in str(pq.read_table(tmp_path / "a/iterations/000002/verdicts.parquet")["verdict"])


@pytest.mark.slow
def test_a_run_whose_weights_degenerate_goes_less_far_ahead_also_after_a_kill(
    tailed: Workplace, tmp_path: Path
) -> None:
    """Tokens of older weights fill every batch but the first, so that each of them is below such a bound."""
    settings = [
        *forms.overrides("ahead"),
        "run.iterations=7",
        "pipeline.min_ess=0.99999",
        "trainer.optimizer.lr=0.005",
        "checkpoint.every=3",
    ]
    reached = tmp_path / "reached"
    process = tailed.start(
        *("train", "run.yaml", f"storage.root={tmp_path / 'killed'}", *settings),
        MILLRACE_KILL_POINT="5/sample_prompts/before",
        MILLRACE_KILL_POINT_FILE=str(reached),
    )
    wait_until(lambda: reached.exists() or process.poll() is not None)
    assert reached.exists(), process.communicate()[0]
    process.kill()
    process.communicate()
    tailed.train(tmp_path / "killed", *settings)
    tailed.train(tmp_path / "whole", *settings)
    killed, whole = tmp_path / "killed" / "a", tmp_path / "whole" / "a"
    lowered = [{"since": 0, "iterations": 1}, {"since": 5, "iterations": 0}]
    for run in (killed, whole):
        assert json.loads((run / "run.json").read_text())["ahead"] == lowered
    ess = [[step["ess"] for step in read_steps(folder)] for folder in sorted(whole.glob("iterations/*"))]
    assert [max(of) < 0.99999 for of in ess] == [False, True, True, True, True, False, False]
    oldest = [
        max(
            index - min(span["version"] for span in row["policy_versions"]) // STEPS
            for row in rows
            if row["policy_versions"]
        )
        for index, rows in enumerate(batches(whole))
    ]
    assert oldest == [0, 1, 1, 1, 1, 0, 0]
    assert not promises.different_numbers(whole, killed)
    assert final_weights(whole) == final_weights(killed)
    assert not promises.faulted_by_commands(tailed, killed)
    tailed.call("branch", "a", "b", "--at", "6", "--root", str(killed.parent))
    branch = killed.parent / "b"
    assert json.loads((branch / "run.json").read_text())["ahead"] == lowered
    assert "nothing is wrong" in tailed.call("verify", "b", "--root", str(killed.parent))


def read_steps(folder: Path) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = json.loads((folder / "step.json").read_text())["steps"]
    return steps
