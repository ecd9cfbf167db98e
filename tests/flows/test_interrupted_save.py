"""Ctrl-C amid the save of a checkpoint that takes minutes: the command ends in time, its files are whole, and it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.storage.store import Store
from tests.soak import victims
from tests.soak.harness import ENDS_WITHIN_S
from tests.soak.promises import broken_by_ctrl_c
from tests.support.flow_runs import Workplace, output_of, wait_until

SHORT = ("run.iterations=1", "evaluation.every=9", "checkpoint.export_last=false")
SAVE_S = 300.0  # how long storage takes for one shard


class SlowShards:
    """An object store that takes minutes for a shard of a checkpoint, until it is let go."""

    def __init__(self) -> None:
        self.under_way = threading.Event()
        self.let_go = threading.Event()

    def wait(self, address: str) -> None:
        if address.endswith(".distcp"):
            self.under_way.set()
            self.let_go.wait(SAVE_S)


@pytest.fixture
def slow_shards(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowShards]:
    from moto.s3.responses import S3Response

    slow, put_object = SlowShards(), S3Response.put_object

    def put_slowly(response: S3Response) -> Any:
        slow.wait(response.uri.partition("?")[0])
        return put_object(response)

    monkeypatch.setattr(S3Response, "put_object", put_slowly)
    yield slow
    slow.let_go.set()


def amid_the_save(place: Workplace, root: str, slow: SlowShards) -> subprocess.Popen[str]:
    """The run `a`, which waits for storage to take its checkpoint."""
    slow.under_way.clear()
    process = place.start("train", "run.yaml", f"storage.root={root}", *SHORT)
    wait_until(lambda: slow.under_way.is_set() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    time.sleep(1.0)
    return process


def interrupt(process: subprocess.Popen[str], times: int = 1) -> tuple[float, str]:
    """Ctrl-C; the seconds until the command ended, and what it had printed."""
    started = time.perf_counter()
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
    out = output_of(process)
    return time.perf_counter() - started, out


def live_parts(place: Workplace, driver: int) -> list[int]:
    home = Path(place.environment["MILLRACE_HOME"])
    return [pid for part in ("trainer", "engine") for pid in victims.processes(part, driver, home)]


@pytest.mark.slow
def test_ctrl_c_amid_a_long_save_ends_the_run_in_time_and_the_same_command_goes_on(
    workplace: Workplace, whole: Path, s3_bucket: str, slow_shards: SlowShards
) -> None:
    root = f"{s3_bucket}/{uuid.uuid4().hex}"
    workplace.environment.update({name: here for name, here in os.environ.items() if name.startswith("AWS_")})
    store = Store(root).child("a")
    process = amid_the_save(workplace, root, slow_shards)
    assert live_parts(workplace, process.pid)
    seconds, out = interrupt(process)
    limit = ENDS_WITHIN_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert broken_by_ctrl_c(process.returncode, out, seconds, limit) == []
    wait_until(lambda: not live_parts(workplace, process.pid), limit)
    assert not store.exists("checkpoints/000001/complete.json")
    assert not store.exists("iterations/000000/results/checkpoint.json")
    process = amid_the_save(workplace, root, slow_shards)  # saves again
    seconds, out = interrupt(process, times=2)
    assert process.returncode == 130
    assert seconds < 3
    assert "Ended at once" in out
    slow_shards.let_go.set()
    assert "1 iterations complete, 1 of them now" in workplace.train(root, *SHORT)
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", root)
    steps = store.read_json("iterations/000000/step.json")["steps"]
    wanted = json.loads((whole / "iterations" / "000000" / "step.json").read_text())["steps"]
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [
        (step["loss"], step["grad_norm"]) for step in wanted
    ]
