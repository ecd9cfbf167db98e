"""A run on one shared GPU from the command line: weights, log-probabilities, and an engine killed in the middle."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.flow_runs import Workplace, failures, trained, wait_until
from tests.support.gpu_workplace import GROUP, PROMPTS, furnish, server_of, steps_of

ITERATIONS, KILLED_IN = 3, 1
PATIENCE_S = 420
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Done:
    """A run whose engine was killed in iteration KILLED_IN, and what it printed."""

    folder: Path
    code: int
    out: str
    parts_when_killed: int


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("one-gpu")
    furnish(folder, run={"name": "a", "iterations": ITERATIONS})
    place = Workplace(folder)
    run = folder / "runs" / "a"
    parts = run / "iterations" / f"{KILLED_IN:06d}" / "rollouts"
    process = place.start("train", "run.yaml")
    try:
        wait_until(lambda: process.poll() is not None or any(parts.glob("part-*")), patience_s=PATIENCE_S)
        server = server_of(folder / "model")
        assert server is not None, process.communicate()[0]
        there = len(list(parts.glob("part-*")))
        server.send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            process.kill()
        subprocess.run(["tail", "-n", "40", str(run / "logs" / "engine-0.log")], check=False)
        place.call("server", "stop")
    return Done(run, process.returncode, out, there)


def test_the_run_in_which_an_engine_was_killed_completes(done: Done) -> None:
    """Every sync of it compared engine and trainer on fixed texts (sync.max_prompt_gap)."""
    assert done.code == 0, done.out[-5000:]
    record = json.loads((done.folder / "run.json").read_text())
    assert record["completed"]
    assert len(record["attempts"]) == 1
    assert "restart 1 of" in done.out
    assert done.parts_when_killed >= 1


def test_every_sample_was_trained_once(done: Done) -> None:
    assert not failures(done.folder), done.out
    pairs = trained(done.folder)
    assert len(pairs) == len({sample for sample, _ in pairs}) == ITERATIONS * PROMPTS * GROUP


def test_engine_and_trainer_agree_on_log_probabilities(done: Done) -> None:
    for step in steps_of(done.folder):
        assert 0 < step["logprob_gap_mean"] < 0.02
