"""What libraries print stays off the terminal of a command, in a log that a failing command names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PRINTS = r"""
import os, sys, threading
from millrace.flows.cli.terminal import console, errors, libraries_kept_off_terminal

def ray():
    print("[state-dump] of a raylet")

with libraries_kept_off_terminal():
    os.write(2, b"*** SIGTERM received\n")
    os.system("echo of a child >&2")
    thread = threading.Thread(target=ray, name="ray_listen_error_messages")
    thread.start()
    thread.join()
    print("a line")
    console.print("a table")
    print("a warning", file=sys.stderr)
    errors.print("an error")
    sys.exit(int(sys.argv[1]))
"""


def prints(home: Path, code: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRINTS, str(code)],
        env={**os.environ, "MILLRACE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_libraries_write_to_a_log_and_python_to_the_terminal(tmp_path: Path) -> None:
    done = prints(tmp_path, 2)
    assert done.returncode == 2
    assert done.stdout.splitlines() == ["a line", "a table"]
    log = tmp_path / "stderr.log"
    assert done.stderr.splitlines() == [
        "a warning",
        "an error",
        f"What libraries wrote meanwhile is in {log}",
    ]
    assert log.read_text().splitlines() == ["*** SIGTERM received", "of a child", "[state-dump] of a raylet"]
