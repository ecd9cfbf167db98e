"""Ray nodes on one host with a GPU each: the trainer on one, the engine on the other; and an engine over two of them."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support import flow_runs
from tests.support.flow_runs import Workplace, trained, wait_until
from tests.support.gpu_workplace import GROUP, PROMPTS, SERVER, SGLANG, furnish, server_of, steps_of
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


OVER_NODES = {"gpus": 2, "nodes": 2, "host": "0.0.0.0", "kind": "sglang"}
# here both nodes are one host, for whose GPUs SGLang would take an all-reduce that needs all of them in each process
SGLANG_OVER_NODES = {**SGLANG, "disable_custom_all_reduce": True, "mem_fraction_static": 0.2}


class RunOverNodes:
    """A run with an engine of two GPUs, one on each of two nodes; further nodes have a GPU each."""

    def __init__(self, folder: Path, nodes: int, **changes: dict[str, Any]) -> None:
        self.folder, self.place, self.cluster = folder, Workplace(folder), RayNodes()
        (folder / "weights").mkdir()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(nodes)))).split(",")
        for gpu in gpus[:nodes]:
            self.cluster.add(cpus=4, gpus=1, CUDA_VISIBLE_DEVICES=gpu).wait()
        placement = {"ray_address": self.cluster.address, "tensor_over_hosts": True}
        furnish(
            folder,
            run={"name": "nodes", "iterations": 3},
            trainer={"device": "cuda", **changes.pop("trainer", {})},
            engines={"sglang": SGLANG_OVER_NODES, **OVER_NODES},
            placement={**placement, **changes.pop("placement", {})},
            sync={"directory": str(folder / "weights"), "max_prompt_gap": 0.02, **changes.pop("sync")},
        )
        assert not changes
        self.process = self.place.start("train", "run.yaml", **self.cluster.environment)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "nodes"

    def servers(self) -> dict[int, psutil.Process]:
        """The engine's processes by the rank of their nodes."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if SERVER not in line or str(self.folder / "model") not in line or "--node-rank" not in line:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = process.parent()
                if parent is None or SERVER not in parent.cmdline():
                    found[int(line[line.index("--node-rank") + 1])] = process
        return found

    def trained(self) -> str:
        """What the run printed, which must have trained all samples with engine and trainer alike."""
        out, _ = self.process.communicate(timeout=2 * PATIENCE_S)
        assert self.process.returncode == 0, out[-5000:]
        assert json.loads((self.run / "run.json").read_text())["completed"]
        assert len(trained(self.run)) == 3 * PROMPTS * GROUP
        for step in steps_of(self.run):
            assert 0 < step["logprob_gap_mean"] < 0.02
        wait_until(lambda: not self.servers(), PATIENCE_S)
        return out

    def close(self) -> None:
        self.cluster.close()
        self.place.call("server", "stop")


SHARED = {"placement": {"colocate": True}, "trainer": {"world_size": 2}}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tensor", [1, 2])
def test_an_engine_over_two_nodes_shares_their_gpus_with_the_trainer(
    tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank hands its copy of the weights to the engine's process on its node, and both sides give their memory in turn."""
    monkeypatch.setattr(flow_runs, "PATIENCE_S", PATIENCE_S)
    parallel = {"tensor": tensor, "sequence": tensor > 1}
    trainer = {**SHARED["trainer"], "parallel": parallel}
    run = RunOverNodes(tmp_path, 2, **{**SHARED, "trainer": trainer}, sync={"kind": "ipc"})
    try:
        wait_until(lambda: run.process.poll() is not None or len(run.servers()) == 2, PATIENCE_S)
        assert run.process.poll() is None, run.process.communicate()[0][-5000:]
        seen = [server.environ()["CUDA_VISIBLE_DEVICES"] for server in run.servers().values()]
        assert len(set(seen)) == 2
        run.trained()
    finally:
        run.close()


@pytest.mark.timeout(1200)
def test_an_engine_over_two_nodes_is_started_again_when_the_second_loses_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "PATIENCE_S", PATIENCE_S)
    run = RunOverNodes(tmp_path, 2, **SHARED, sync={"kind": "disk"})
    try:
        done = run.run / "iterations" / "000000" / "manifest.json"
        wait_until(lambda: run.process.poll() is not None or done.exists(), 2 * PATIENCE_S)
        assert run.process.poll() is None, run.process.communicate()[0][-5000:]
        before = run.servers()
        before[1].kill()
        wait_until(lambda: run.process.poll() is not None or not before[0].is_running(), PATIENCE_S)
        assert run.process.poll() is None, run.process.communicate()[0][-5000:]
        assert "restart 1 of 3" in run.trained()
    finally:
        run.close()


@pytest.mark.timeout(1200)
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
def test_weights_are_broadcast_to_an_engine_over_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "PATIENCE_S", PATIENCE_S)
    run = RunOverNodes(tmp_path, 3, placement={"colocate": False}, sync={"kind": "broadcast"})
    try:
        run.trained()
    finally:
        run.close()
