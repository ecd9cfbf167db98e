"""How long `millrace check` takes, start of the interpreter to its end: on a good configuration, wrong ones and newcomers' mistakes.

    python -m benchmarks.check_command [--out FILE] [--mistakes]

Each runs in a process of its own, as from a shell. Prints the slowest and the median. --mistakes: those of newcomers alone,
through `millrace train`, which must refuse them as fast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.mistakes import MISTAKES, write_mistakes, write_runs
from tests.support.wrong_configs import WRONG, write_good


def main() -> None:
    """Time them all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--mistakes", action="store_true", help="newcomers' mistakes alone, through train")
    options = parser.parse_args()
    cases = [] if options.mistakes else [(name, overrides) for name, overrides, _ in WRONG]
    cases += [(mistake.name, mistake.overrides) for mistake in MISTAKES]
    command = "train" if options.mistakes else "check"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_good(Path(folder))
        write_mistakes(Path(folder))
        write_runs(Path(folder))
        good = _seconds("check", folder, [], expect=0)
        wrong = {name: _seconds(command, folder, overrides, expect=2) for name, overrides in cases}
    slowest = max(wrong, key=lambda name: wrong[name])
    print(f"good configuration: {good:.2f} s")
    print(
        f"{len(wrong)} wrong ones: median {statistics.median(wrong.values()):.2f} s, slowest {wrong[slowest]:.2f} s ({slowest})"
    )
    if options.out:
        options.out.write_text(json.dumps({"good_s": good, "wrong_s": wrong}, indent=1) + "\n")


def _seconds(name: str, folder: str, overrides: list[str], expect: int) -> float:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    }
    environment |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    command = [sys.executable, "-m", "millrace.flows.commands", name, "run.yaml", *overrides]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    assert done.returncode == expect, done.stdout + done.stderr
    return seconds


if __name__ == "__main__":
    main()
