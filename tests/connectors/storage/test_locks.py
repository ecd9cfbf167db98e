"""The lock of a host's local servers: one process at a time, and none waits for ever for one that was stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.connectors.host import local_files as local
from millrace.core.errors import StalledError

HOLDER = """
import sys, time
from pathlib import Path
from millrace.connectors.host.local_files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_whose_holder_is_stopped_is_named_and_one_whose_holder_died_is_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOCKED_S", 0.3)
    lock = tmp_path / "ray-head.lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGSTOP)
        with (
            pytest.raises(StalledError, match=r"ray-head.lock: another process holds.*continue or end it"),
            local.locked(lock),
        ):
            raise AssertionError("two at once")
        holder.kill()
    with local.locked(lock):
        pass
