"""Rollouts of several turns with SGLang on one GPU: log-probabilities over all turns, and a driver killed among them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.soak.rollouts import MODULE, NOTES, SESSIONS, made_again, noted, recorded_calls
from tests.support.flow_runs import Workplace, wait_until
from tests.support.gpu_workplace import GROUP, PROMPTS, furnish, steps_of

ITERATIONS = 2
TURN_TOKENS = 96
PATIENCE_S = 420
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "soak_rollouts.py").write_text(MODULE)
    session = {**SESSIONS["tool"], "max_tokens": 512, "max_turns": 4}
    furnish(
        folder,
        run={"name": "a", "iterations": ITERATIONS},
        rollout={"session": session, "sampling": {"max_new_tokens": TURN_TOKENS}},
    )
    made = Workplace(folder)
    made.environment[NOTES] = str(folder / "notes.txt")
    yield made
    made.call("server", "stop")


@pytest.fixture(scope="module")
def run(place: Workplace) -> Path:
    """A run whose driver was killed among the turns of its second iteration, and that went on."""
    reached, folder = place.folder / "reached", place.folder / "runs" / "a"
    process = place.start(
        "train", "run.yaml", MILLRACE_KILL_POINT="1/turns/in", MILLRACE_KILL_POINT_FILE=str(reached)
    )
    wait_until(lambda: reached.exists() or process.poll() is not None, patience_s=PATIENCE_S)
    assert reached.exists(), process.communicate()[0][-5000:]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    parts = list(folder.glob("iterations/000001/turns/part-*.parquet"))
    assert parts
    recorded, before = recorded_calls(parts), noted(place.folder / "notes.txt")
    process = place.start("train", "run.yaml")
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out[-5000:]
    assert not made_again(recorded, before, noted(place.folder / "notes.txt"))
    return folder


def test_engine_and_trainer_agree_over_several_turns(run: Path) -> None:
    for step in steps_of(run):
        assert 0 < step["logprob_gap_mean"] < 0.02


def test_what_is_trained_are_the_turns_token_for_token(place: Workplace, run: Path) -> None:
    assert "nothing is wrong" in place.call("verify", "a", "--root", str(run.parent))
    for index in range(ITERATIONS):
        rows: list[dict[str, Any]] = pq.read_table(
            run / "iterations" / f"{index:06d}" / "batch.parquet"
        ).to_pylist()
        assert {row["role"] for row in rows} == {None, "critic"}
        assert len({row["sample_id"].partition(".")[0] for row in rows}) == PROMPTS * GROUP
        for row in rows:
            assert row["turns"] == (1 if row["role"] else 2)
            assert 0 < sum(row["loss_mask"]) <= TURN_TOKENS * row["turns"]


def test_the_record_has_the_metrics_of_sessions(run: Path) -> None:
    manifest = json.loads((run / "iterations" / "000001" / "manifest.json").read_text())
    assert manifest["tasks"]["metrics"]["session/turns_mean"] == 2.5
