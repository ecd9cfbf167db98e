"""Two Ray nodes on one host with a GPU each: the trainer on one, the engine on the other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest
import torch

from tests.support import flow_runs
from tests.support.flow_runs import Workplace, trained, wait_until
from tests.support.gpu_workplace import GROUP, PROMPTS, furnish, server_of, steps_of
from tests.support.ray_nodes import RayNodes

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

PATIENCE_S = 420


@pytest.mark.timeout(900)
def test_a_run_across_two_nodes_with_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_runs, "PATIENCE_S", PATIENCE_S)
    (tmp_path / "weights").mkdir()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    place, cluster = Workplace(tmp_path), RayNodes()
    try:
        nodes = [cluster.add(cpus=4, gpus=1, CUDA_VISIBLE_DEVICES=gpu).wait() for gpu in gpus[:2]]
        furnish(
            tmp_path,
            run={"name": "nodes", "iterations": 3},
            engines={"host": "0.0.0.0"},
            placement={"colocate": False, "ray_address": cluster.address},
            sync={"kind": "disk", "directory": str(tmp_path / "weights")},
        )
        process = place.start("train", "run.yaml", **cluster.environment)
        wait_until(lambda: process.poll() is not None or bool(server_of(tmp_path / "model")), PATIENCE_S)
        server = server_of(tmp_path / "model")
        assert server is not None, process.communicate()[0]
        host = server.parent()
        assert host is not None
        wait_until(lambda: process.poll() is not None or all(node.actors() for node in nodes), PATIENCE_S)
        assert process.poll() is None, process.communicate()[0]
        (engine_node,) = [number for number, node in enumerate(nodes) if host.pid in node.actors()]
        assert server.environ()["CUDA_VISIBLE_DEVICES"] == gpus[engine_node]
        (rank,) = nodes[1 - engine_node].actors()
        assert psutil.Process(rank).is_running()
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, out[-5000:]
    finally:
        cluster.close()
        place.call("server", "stop")
    run = tmp_path / "runs" / "nodes"
    assert json.loads((run / "run.json").read_text())["completed"]
    assert len(trained(run)) == 3 * PROMPTS * GROUP
    for step in steps_of(run):
        assert 0 < step["logprob_gap_mean"] < 0.02
