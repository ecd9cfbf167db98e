"""Whole runs in which a trainer rank is stopped: the run replaces it and ends as an undisturbed one; one that stays wedged ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.flow_runs import PATIENCE_S, Workplace, final_weights, output_of, trained, wait_until

pytestmark = pytest.mark.slow
if sys.platform != "linux":
    pytest.skip("other systems do not stop processes alike", allow_module_level=True)

# A busy host takes some 20 s to start a rank, in which nothing may move
TWO_RANKS = ["trainer.world_size=2", "run.progress_timeout_s=45"]


def rank_processes(workplace: Workplace) -> list[psutil.Process]:
    """The processes of the run's trainer ranks."""
    home = str(workplace.folder / "home")
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("MILLRACE_HOME") == home
            threads = "ray::Host" in " ".join(process.info["cmdline"] or ())
            if ours and threads and not process.children():  # an engine's holder has its server as a child
                found.append(process)
    return found


def test_a_rank_that_is_stopped_is_replaced_and_the_run_ends_as_an_undisturbed_one(
    workplace: Workplace, tmp_path: Path
) -> None:
    workplace.train(tmp_path / "whole", *TWO_RANKS)
    reached = tmp_path / "reached"
    held = {"MILLRACE_KILL_POINT": "1/train_step/before", "MILLRACE_KILL_POINT_FILE": str(reached)}
    process = workplace.start("train", "run.yaml", f"storage.root={tmp_path / 'cut'}", *TWO_RANKS, **held)
    wait_until(lambda: reached.exists() or process.poll() is not None)
    ranks = rank_processes(workplace)
    assert len(ranks) == 2, ranks
    ranks[1].send_signal(signal.SIGSTOP)
    reached.unlink()
    out = output_of(process, 2 * PATIENCE_S)
    assert process.returncode == 0, out
    # as its next call finds it, or as the limit of the call does where it had begun
    assert "does not answer for 20 s" in out or "nothing moved for 45 s (run.progress_timeout_s)" in out, out
    assert trained(tmp_path / "cut" / "a") == trained(tmp_path / "whole" / "a")
    assert final_weights(tmp_path / "cut" / "a") == final_weights(tmp_path / "whole" / "a")


def test_a_run_that_stands_still_again_ends_with_a_recorded_verdict_and_the_next_start_goes_on(
    workplace: Workplace, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    held = {"MILLRACE_KILL_POINT": "1/train_step/before", "MILLRACE_KILL_POINT_FILE": str(reached)}
    process = workplace.start("train", "run.yaml", f"storage.root={tmp_path}", *TWO_RANKS, **held)
    wait_until(lambda: reached.exists() or process.poll() is not None)
    stopped: set[int] = set()
    reached.unlink()
    until = time.monotonic() + 2 * PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < until
        for rank in rank_processes(workplace):
            if rank.pid not in stopped and time.time() - rank.create_time() > 1:
                stopped.add(rank.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(0.2)
    out = output_of(process)
    assert process.returncode == 2, out
    assert "ActorStalledError" in out
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    verdict = record["attempts"][-1]["stalled"]
    assert verdict["error"] == "ActorStalledError"
    assert "trainer-0 to trainer-1" in verdict["waited_for"]
    assert "run.progress_timeout_s" in verdict["reason"]
    out = workplace.train(tmp_path, *TWO_RANKS)
    assert "the start before ended by a stall" in out
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", str(tmp_path))
