"""Whole runs in two shards: one that waits where a shard has written a part, and what it left beside a run without shards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from millrace.connectors.host.process_identity import wait_ended
from tests.support.flow_runs import Workplace, final_weights, generated, output_of, trained, wait_until

IN_SHARDS = ("placement.task_runner=ray", "rollout.shards=2", "engines.count=2")


class Held:
    """A run in two shards that waits where a shard has written a part of the second iteration's samples, of a batch or held out."""

    def __init__(self, workplace: Workplace, folder: Path, task: str, *overrides: str) -> None:
        self.root = folder / "runs"
        self.held = folder / "held"
        stop = {"MILLRACE_KILL_POINT": f"1/{task}/in", "MILLRACE_KILL_POINT_FILE": str(self.held)}
        arguments = ("train", "run.yaml", f"storage.root={self.root}", *IN_SHARDS, *overrides)
        self.process: subprocess.Popen[str] = workplace.start(*arguments, **stop)
        wait_until(self._is_held)
        assert self.process.poll() is None, self.process.communicate()[0]
        self.shard = psutil.Process(int(self.held.read_text()))
        assert self.shard.pid != self.process.pid

    def kill_shard(self) -> None:
        """`kill -9` of the process of the shard that waits."""
        self.shard.send_signal(signal.SIGKILL)
        assert not wait_ended([self.shard], 20)

    def kill_driver(self) -> None:
        """`kill -9` of the driver; its shards end with it."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        wait_until(lambda: not self.shard.is_running(), patience_s=30)

    def to_the_end(self) -> str:
        """Let go of it wherever it waits; what it printed."""
        wait_until(lambda: self._let_go() or self.process.poll() is not None)
        out = output_of(self.process)
        assert self.process.returncode == 0, out
        return out

    def _is_held(self) -> bool:
        written = self.held.exists() and self.held.read_text() != ""
        return written or self.process.poll() is not None

    def _let_go(self) -> bool:
        self.held.unlink(missing_ok=True)
        return False


def assert_like(run: Path, whole: Path) -> None:
    """The run trained the samples of the whole run to the same weights, evaluated alike, and generated none twice."""
    assert trained(run) == trained(whole)
    assert final_weights(run) == final_weights(whole)
    assert max(generated(run).values()) == 1
    assert evaluations(run) == evaluations(whole)
    assert max(evaluated(run).values()) == 1


def evaluations(run: Path) -> dict[str, Any]:
    """The rows of each evaluation, and the figures that its record has of them."""
    found: dict[str, Any] = {
        str(path.relative_to(run)): pq.read_table(path).to_pylist()
        for path in (run / "eval").rglob("*.parquet")
    }
    for path in run.glob("iterations/*/results/evaluate*.json"):
        sets = json.loads(json.loads(path.read_text())["result"])["sets"]
        found[str(path.relative_to(run))] = {name: {**each, "file": None} for name, each in sets.items()}
    return found


def evaluated(run: Path) -> Counter[tuple[Any, ...]]:
    """How often each sample of a held-out set was generated and stored, in whatever part."""
    return Counter(
        (row["set"], row["version"], row["prompt_id"], row["index"])
        for path in run.glob("iterations/*/evaluations/part-*.parquet")
        for row in pq.read_table(path).to_pylist()
    )
