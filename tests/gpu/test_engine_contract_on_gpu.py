"""The contract that the embedded engine keeps, against SGLang itself on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.shapes import SGLANG, configuration
from millrace.connectors.engines.process import EngineServer
from millrace.core.config import RunConfig
from tests.support.engine_process import peaked_model

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.25  # of log-probabilities: bf16 weights and activations against a plain forward in fp32


@pytest.mark.timeout(900)
def test_sglang_keeps_the_engine_contract(tmp_path: Path) -> None:
    model = peaked_model(tmp_path / "model", seed=0, head_dim=64)
    sglang = {**SGLANG, "mem_fraction_static": 0.2, "cuda_graph_max_bs_decode": 16}
    values = configuration(
        model, tmp_path, run={"name": "contract"}, engines={"kind": "sglang", "sglang": sglang}
    )
    server = EngineServer(RunConfig.model_validate(values).model_dump(mode="json"), 0, 1)
    try:
        state = server.start(str(model))
        assert state["url"]
        assert state["key"]
        given = {"MILLRACE_ENGINE_URL": state["url"], "MILLRACE_ENGINE_KEY": state["key"]}
        given["MILLRACE_ENGINE_TOLERANCE"] = str(TOLERANCE)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-rf",
            "tests/connectors/engine_contract",
            "tests/connectors/sglang_protocol",
        ]
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout[-8000:]
        assert " failed" not in ended.stdout
    finally:
        server.stop()
