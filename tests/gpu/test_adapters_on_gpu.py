"""Adapters that SGLang serves by name on one GPU: the engine contract, and a run that trains them beside its engine.

`-s` prints the run's figures: seconds of each sync, and the differences of engine and trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.shapes import SGLANG, configuration
from millrace.connectors.engines.process import EngineServer
from millrace.core.config import RunConfig
from tests.support.engine_process import peaked_model
from tests.support.flow_runs import Workplace, failures, sync_records, versions_of_samples
from tests.support.gpu_workplace import furnish, steps_of

ROOT = Path(__file__).parents[2]
TOLERANCE = (
    0.25  # of log-probabilities: bf16 weights, adapters and activations against a plain forward in fp32
)
CONTRACT = "tests/connectors/engine_contract/test_contract_adapters.py"


@pytest.mark.timeout(600)
def test_sglang_keeps_the_contract_of_adapters(tmp_path: Path) -> None:
    model = peaked_model(tmp_path / "model", seed=0, head_dim=64)
    sglang = {**SGLANG, "mem_fraction_static": 0.2, "cuda_graph_max_bs_decode": 16}
    values = configuration(
        model,
        tmp_path,
        run={"name": "contract"},
        algorithm={"correction": {"kind": "truncate"}},
        engines={"kind": "sglang", "sglang": sglang},
        placement={"colocate": False},
        pipeline={"ahead": 1},
        trainer={"lora": {"rank": 8, "alpha": 16}},
        sync={"lora": "names"},
    )
    server = EngineServer(RunConfig.model_validate(values).model_dump(mode="json"), 0, 1)
    try:
        state = server.start(str(model))
        assert state["url"]
        assert state["key"]
        given = {
            "MILLRACE_ENGINE_URL": state["url"],
            "MILLRACE_ENGINE_KEY": state["key"],
            "MILLRACE_ENGINE_TOLERANCE": str(TOLERANCE),
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfs", CONTRACT]
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout[-8000:]
        assert "5 passed" in ended.stdout, ended.stdout[-2000:]
    finally:
        server.stop()


@pytest.mark.timeout(900)
def test_a_run_trains_adapters_beside_an_engine_that_never_pauses(tmp_path: Path) -> None:
    furnish(
        tmp_path,
        run={"name": "a", "iterations": 4},
        trainer={"lora": {"rank": 16, "alpha": 32}, "optimizer": {"lr": 1e-3}},
        placement={"colocate": True, "offload_engines": False, "offload_trainer": False},
        sync={"kind": "auto", "lora": "names", "max_prompt_gap": 0.02},
    )
    place = Workplace(tmp_path)
    try:
        out = place.train(tmp_path / "runs")
    finally:
        subprocess.run(["tail", "-n", "40", str(tmp_path / "runs/a/logs/engine-0.log")], check=False)
        place.call("server", "stop")
    run = tmp_path / "runs" / "a"
    assert not failures(run), out
    records = sync_records(run)
    gaps = [step["logprob_gap_mean"] for step in steps_of(run)]
    print(json.dumps({"syncs": records, "gaps": gaps}))
    assert all(record["phases"].keys() == {"export", "load"} for record in records)
    assert all(0 < record["prompt_gap"] < 0.02 for record in records)
    assert all(0 < gap < 0.02 for gap in gaps)
    found = versions_of_samples(run)
    assert {len(each) for each in found} == {1}, "a sample is of one version"
    assert len({each[0] for each in found}) == 4
