"""A local Ray head that stands still, or ends its service and not its process: the run says so, starts another and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.flow_runs import Workplace, output_of, trained, wait_until

pytestmark = pytest.mark.slow
SHORT = ["run.iterations=2", "evaluation.sets=[]"]


def ended(head: list[psutil.Process]) -> None:
    """By SIGTERM the server shuts its port; its process may go on for ever."""
    for process in head:
        if process.name() == "gcs_server":
            process.terminate()


def stopped(head: list[psutil.Process]) -> None:
    for process in head:
        process.suspend()


def server_stopped(head: list[psutil.Process]) -> None:
    for process in head:
        if process.name() == "gcs_server":
            process.suspend()


def head_of(place: Workplace) -> list[psutil.Process]:
    record = json.loads((place.folder / "home" / "ray.json").read_text())
    return [psutil.Process(pid) for pid in record["pids"]]


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def held_amid_rollout(place: Workplace, root: Path, held: Path) -> subprocess.Popen[str]:
    """A driver that waits in its first rollout until the file `held` is removed."""
    points = {"MILLRACE_KILL_POINT": "0/rollout/in", "MILLRACE_KILL_POINT_FILE": str(held)}
    driver = place.start("train", "run.yaml", f"storage.root={root}", *SHORT, **points)
    wait_until(lambda: held.exists() or driver.poll() is not None)
    assert driver.poll() is None, driver.communicate()[0]
    return driver


@pytest.mark.parametrize("fault", [ended, stopped, server_stopped])
def test_a_run_whose_head_answers_no_more_goes_on(
    workplace: Workplace, tmp_path: Path, fault: Callable[[list[psutil.Process]], None]
) -> None:
    """The driver ended with 1 and said nothing, a minute later."""
    held = tmp_path / "held"
    driver = held_amid_rollout(workplace, tmp_path, held)
    before = head_of(workplace)
    fault(before)
    held.unlink()
    out = output_of(driver)
    assert driver.returncode == 0, out
    assert "Traceback" not in out
    assert not any(lives(process) for process in before)
    pairs = trained(tmp_path / "a")
    assert len(pairs) == len(set(pairs)) == 64


@pytest.mark.parametrize("fault", [ended, stopped])
def test_a_start_beside_a_head_that_answers_no_more_starts_another(
    workplace: Workplace, tmp_path: Path, fault: Callable[[list[psutil.Process]], None]
) -> None:
    """The start ended with a traceback of a ConnectionError after 50 s."""
    held = tmp_path / "held"
    driver = held_amid_rollout(workplace, tmp_path, held)
    before = head_of(workplace)
    os.kill(driver.pid, signal.SIGKILL)
    output_of(driver)
    held.unlink()
    fault(before)
    out = workplace.train(tmp_path, *SHORT)
    assert "the local Ray head does not answer" in out
    assert "Traceback" not in out
    assert not any(lives(process) for process in before)
