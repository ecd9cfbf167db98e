"""A run trained on the stored rollouts of another: the same weights by the same settings, though killed; other weights by others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace.flows.commands.verify import verify_run
from tests.support.flow_runs import Workplace, final_weights, trained

FROM = (
    "pipeline.rollouts_from=a",
    "evaluation.sets=[]",
    "engines.start_timeout_s=0.001",  # no engine could start
)
OTHERS = ("trainer.optimizer.lr=1e-2", "algorithm.preset=dr_grpo", "filter.drop_zero_variance=true")


@pytest.fixture(scope="module")
def root(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage root with the finished run `a`."""
    root = tmp_path_factory.mktemp("stored")
    shutil.copytree(whole, root / "a")
    return root


@pytest.fixture(scope="module")
def same(workplace: Workplace, root: Path) -> Path:
    """The run `same`, of the settings of `a`."""
    assert "3 iterations complete, 3 of them now" in workplace.train(root, *FROM, "run.name=same")
    return root / "same"


@pytest.fixture(scope="module")
def killed(workplace: Workplace, root: Path) -> Path:
    """The run `killed`, of the settings of `a`, killed while it copied."""
    copied = root / "killed" / "iterations" / "000001" / "rollouts"
    workplace.train_and_kill(root, lambda: any(copied.glob("part-*")), *FROM, "run.name=killed")
    assert "3 iterations complete, 2 of them now" in workplace.train(root, *FROM, "run.name=killed")
    return root / "killed"


@pytest.fixture(scope="module")
def other(workplace: Workplace, root: Path) -> Path:
    """The run `other`, of another rate, loss and filter."""
    workplace.train(root, *FROM, *OTHERS, "run.name=other")
    return root / "other"


@pytest.mark.parametrize("name", ["same", pytest.param("killed", marks=pytest.mark.slow)])
def test_the_same_settings_make_the_same_weights_bit_for_bit(
    request: pytest.FixtureRequest, root: Path, name: str
) -> None:
    run: Path = request.getfixturevalue(name)
    assert trained(run) == trained(root / "a")
    assert final_weights(run) == final_weights(root / "a")


@pytest.mark.slow
def test_other_settings_train_the_same_samples_to_other_weights(other: Path, root: Path) -> None:
    assert final_weights(other) != final_weights(root / "a")
    for index in range(3):
        assert rewards(other, index) == rewards(root / "a", index)
        assert {step["lr"] for step in steps(other, index)} == {1e-2}


@pytest.mark.parametrize(
    "name", ["same", *(pytest.param(name, marks=pytest.mark.slow) for name in ("killed", "other"))]
)
def test_such_a_run_verifies_and_had_no_engine(request: pytest.FixtureRequest, root: Path, name: str) -> None:
    request.getfixturevalue(name)
    verdict = verify_run(str(root), name)
    assert verdict.problems == verdict.strangers == []
    assert not any("logprob_gap_floor" in step for index in range(3) for step in steps(root / name, index))
    assert not list((root / name).glob("iterations/*/results/sync_weights.json"))


def test_iterations_that_the_source_lacks_are_refused(workplace: Workplace, root: Path, same: Path) -> None:
    out = workplace.call(
        "check", "run.yaml", f"storage.root={root}", *FROM, "run.name=same", "run.iterations=4", expect=2
    )
    assert "run.iterations" in out
    assert "the run a has stored 3" in out


def steps(run: Path, index: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / f"iterations/{index:06d}/step.json").read_text())["steps"]
    return found


def rewards(run: Path, index: int) -> dict[str, tuple[float, list[float]]]:
    """Reward and log-probabilities of each stored sample."""
    folder = run / f"iterations/{index:06d}"
    scores = {row["sample_id"]: row["reward"] for row in pq.read_table(folder / "rewards").to_pylist()}
    rows = pq.read_table(folder / "rollouts").to_pylist()
    return {row["sample_id"]: (scores[row["sample_id"]], row["rollout_logprobs"]) for row in rows}
