"""Two GPUs: trainer and engine on one each, weights broadcast by NCCL; and layouts that share both with their engines."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.connectors.engines.sglang.server_args import sglang_finds
from tests.support import flow_runs
from tests.support.flow_runs import Workplace, trained
from tests.support.gpu_workplace import GROUP, MODEL, PROMPTS, SGLANG, furnish, steps_of

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

needs_nixl = pytest.mark.skipif(not sglang_finds("nixl"), reason="nixl is not installed where SGLang is")
ITERATIONS = 2
PATIENCE_S = 420
BOTH = {"world_size": 2}
pytestmark = pytest.mark.timeout(900)


def complete(folder: Path, sync: str, shape: Mapping[str, Any] = MODEL, **changes: dict[str, Any]) -> None:
    """Run to the end; after every sync engines and trainer are compared on fixed texts (sync.max_prompt_gap)."""
    name = "two-" + folder.name.removeprefix("test_").rstrip("0123456789").replace("_", "-").strip("-")
    changes["run"] = {"name": name[:40], "iterations": ITERATIONS}
    changes["sync"] = {"kind": "auto", "max_prompt_gap": 0.02, "bucket_mib": 64}
    sglang = {**SGLANG, "mem_fraction_static": 0.15}
    changes["engines"] = {"sglang": sglang, **changes.get("engines", {})}
    if changes["engines"].get("prefill"):
        sglang["disaggregation_transfer_backend"] = "nixl"
    furnish(folder, shape=shape, **changes)
    place = Workplace(folder)
    try:
        place.call("train", "run.yaml")
    finally:
        place.call("server", "stop")
    run = folder / "runs" / name[:40]
    assert json.loads((run / "run.json").read_text())["completed"]
    assert len(trained(run)) == ITERATIONS * PROMPTS * GROUP
    for step in steps_of(run):
        assert 0 < step["logprob_gap_mean"] < 0.02
    record = (run / "iterations" / "000001" / "results" / "sync_weights.json").read_text()
    assert "transfer" in record
    assert ("group" in record) == (sync == "broadcast")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_runs, "PATIENCE_S", PATIENCE_S)


def test_an_engine_on_a_gpu_of_its_own(tmp_path: Path) -> None:
    complete(tmp_path, "broadcast", placement={"colocate": False})


def test_tensor_parallel_ranks_share_gpus_with_an_engine_of_two(tmp_path: Path) -> None:
    parallel = {"tensor": 2, "sequence": True}
    complete(tmp_path, "ipc", trainer={**BOTH, "parallel": parallel}, engines={"gpus": 2})


def test_pipeline_stages_share_gpus_with_two_engines(tmp_path: Path) -> None:
    complete(tmp_path, "ipc", trainer={**BOTH, "parallel": {"pipeline": 2}}, engines={"count": 2})


def test_experts_apart_share_gpus_with_two_engines(tmp_path: Path) -> None:
    shape = {**MODEL, "intermediate_size": 768, "experts": 8, "tie_word_embeddings": False}
    trainer = {**BOTH, "parallel": {"expert": 2}}
    complete(tmp_path, "ipc", shape, trainer=trainer, engines={"count": 2})


@pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"
)
def test_context_parallel_ranks_share_gpus_with_two_engines_behind_a_router(tmp_path: Path) -> None:
    engines = {"count": 2, "router": {"policy": "round_robin"}}
    complete(tmp_path, "ipc", trainer={**BOTH, "parallel": {"context": 2}}, engines=engines)


@needs_nixl
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
def test_trainer_prefill_and_decode_on_a_gpu_each(tmp_path: Path) -> None:
    complete(tmp_path, "broadcast", placement={"colocate": False}, engines={"count": 2, "prefill": 1})
