"""Prefect server and Ray head, each killed while it starts and once more before the run has used it: the run completes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.flow_runs import make_workplace, output_of, wait_until


def record_of(home: Path, name: str) -> dict[str, Any]:
    """A helper's record, {} while there is none."""
    try:
        found: dict[str, Any] = json.loads((home / name).read_text())
    except (OSError, ValueError):
        return {}
    return found


def kill_when(process: subprocess.Popen[str], find: Callable[[], list[int]]) -> list[int]:
    """`kill -9` these processes as soon as there are any."""
    found: list[int] = []
    wait_until(lambda: bool(found.extend(find()) or found) or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.slow
def test_helpers_that_are_killed_during_a_start_are_started_again(tmp_path: Path) -> None:
    place = make_workplace(tmp_path)
    home = Path(place.environment["MILLRACE_HOME"])
    process = place.start("train", "run.yaml", f"storage.root={tmp_path}/runs", "run.iterations=1")

    def server() -> list[int]:
        pid = record_of(home, "prefect-server.json").get("pid")
        return [pid] if pid else []

    def another_server_that_answers() -> list[int]:
        record = record_of(home, "prefect-server.json")
        return [record["pid"]] if record["pid"] not in first and answers(record["url"]) else []

    def parts_of_a_head_that_starts() -> list[int]:
        record = record_of(home, "ray.json")
        if not record or record["pids"]:
            return []
        # with names of attributes, processes that end meanwhile are left out
        there = psutil.process_iter(["name", "cmdline"])
        return [p.pid for p in there if p.info["name"] == "gcs_server" and in_folder(p, record)]

    def in_folder(part: psutil.Process, record: dict[str, Any]) -> bool:
        return any(record["folder"] in argument for argument in part.info["cmdline"] or ())

    def whole_head() -> list[int]:
        return [pid for pid in record_of(home, "ray.json").get("pids", []) if psutil.pid_exists(pid)]

    try:
        first = kill_when(process, server)
        kill_when(process, another_server_that_answers)
        kill_when(process, parts_of_a_head_that_starts)
        kill_when(process, whole_head)
        out = output_of(process)
        assert process.returncode == 0, out
        assert "1 iterations complete, 1 of them now" in out
        for said in ("was killed while it started", "Prefect server died", "Ray did not start"):
            assert said in out
        assert "Ray head died" in out
        assert "nothing is wrong" in place.call("verify", "a", "--root", f"{tmp_path}/runs")
    finally:
        process.kill()
        place.call("server", "stop")
