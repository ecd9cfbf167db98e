"""A test that fails leaves no driver behind: it would take the place, memory and servers of the tests after it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.flow_runs import Workplace, output_of


def sleeping(place: Workplace) -> subprocess.Popen[str]:
    """A command of the workplace that does not end by itself."""
    command, place.command = place.command, [sys.executable, "-c", "import time; time.sleep(600)"]
    process = place.start()
    place.command = command
    return process


def test_a_workplace_that_is_closed_kills_what_it_started(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    processes = [sleeping(place), sleeping(place)]
    place.close()
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_a_command_that_does_not_end_is_killed(tmp_path: Path) -> None:
    process = sleeping(Workplace(tmp_path))
    with pytest.raises(subprocess.TimeoutExpired):
        output_of(process, 0.0)
    assert process.wait(20) == -signal.SIGKILL
