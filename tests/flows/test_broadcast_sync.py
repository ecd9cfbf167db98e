"""A run whose weights go from two pipeline stages to two engines by broadcast, an engine killed on the way."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.flow_runs import Workplace, output_of, trained, wait_until

SYNC = ["sync.kind=broadcast", "sync.bucket_mib=1", "sync.max_prompt_gap=1e-4", "run.name=a"]
SHAPE = ["trainer.world_size=2", "trainer.parallel.pipeline=2", "trainer.device=cpu"]
ENGINES = ["engines.kind=embedded", "engines.count=2"]


def engines_of(model: Path) -> list[psutil.Process]:
    """The servers of engines on a model folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "millrace.connectors.engines.embedded" in (process.info["cmdline"] or [])
        and str(model) in process.info["cmdline"]
    ]


@pytest.mark.slow
def test_weights_are_broadcast_and_those_of_the_trainer_whatever_dies(
    workplace: Workplace, tmp_path: Path
) -> None:
    model = workplace.folder / "model"
    here = [f"storage.root={tmp_path}", f"model.path={model}"]
    process = workplace.start("train", "run.yaml", *here, *SYNC, *SHAPE, *ENGINES)
    manifest = tmp_path / "a" / "iterations" / "000000" / "manifest.json"
    wait_until(lambda: manifest.exists() or process.poll() is not None)
    for engine in engines_of(model)[:1]:
        os.kill(engine.pid, signal.SIGKILL)
    out = output_of(process)
    assert process.returncode == 0, out
    assert "/megatron/" not in out  # what warns when it is imported: the driver has no use for it
    assert re.search(r"engine-\d died: .*; restart 1 of 3", out), out
    assert len(trained(tmp_path / "a")) == 3 * 32
    path = tmp_path / "a" / "iterations" / "000002" / "results" / "sync_weights.json"
    record = json.loads(json.loads(path.read_text())["result"])
    assert record["phases"]["transfer"] > 0
    assert record["checksums"]["engine-0"] == record["checksums"]["engine-1"]
