"""Waiting for processes that end, also on kernels whose pidfd_open says "no such file" of one that has ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from millrace.connectors.host.process_identity import ProcessIdentity, wait_ended

ROOT = Path(__file__).parents[2]
WAITS = re.compile(r"\bwait_procs\s*\(|\bwait_procs,|psutil\.Process\([^)]*\)\.wait\(")


@pytest.fixture
def newer_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """pidfd_open as Linux 6.18 was seen to answer."""

    def pidfd_open(pid: int, flags: int = 0) -> int:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)


def sleeper() -> psutil.Popen:
    return psutil.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)


@pytest.mark.usefixtures("newer_kernel")
def test_processes_that_end_are_waited_for_and_those_that_live_are_named() -> None:
    ending, zombie, living = (sleeper() for _ in range(3))
    try:
        ending.terminate()
        os.waitpid(ending.pid, 0)
        zombie.kill()
        left = [psutil.Process(zombie.pid), psutil.Process(living.pid)]
        assert wait_ended([ending, *left], 0.5) == {left[1]}
        assert psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE
        living.kill()
        assert wait_ended(left, 30) == set()
    finally:
        for process in (zombie, living):
            process.kill()
            os.waitpid(process.pid, 0)


def test_a_process_that_ended_gets_no_signal_there(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ProcessIdentity.own()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    monkeypatch.setattr(os, "pidfd_open", lambda pid: open(f"/proc/{ended.pid}/none"))  # noqa: SIM115
    assert not own.model_copy(update={"pid": ended.pid}).send_signal(signal.SIGTERM)


def test_no_code_waits_with_psutil() -> None:
    folders = (
        "core",
        "connectors",
        "tasks",
        "flows",
        "deployments",
        "src",
        "tests",
        "examples",
        "benchmarks",
    )
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    assert [str(file) for file in files if WAITS.search(file.read_text())] == []
