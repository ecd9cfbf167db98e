"""A run on an engine outside the run trains the same weights as a run that starts its own engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.sglang.client import EngineClient
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import Workplace, final_weights


def holds_other_weights_of_version_0(url: str, model: Path) -> None:
    """As it might of another run, or of an iteration that was discarded: whose number it is nobody can know."""

    async def load() -> None:
        client = EngineClient(url, "engine-0")
        try:
            await client.weights.update_from_disk(str(model), 0)
            assert await client.weight_version() == 0
        finally:
            await client.close()

    asyncio.run(load())


@pytest.mark.slow
def test_a_run_on_an_external_engine_makes_the_same_weights(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    external = "engines={{kind: external, addresses: ['{}']}}"
    refused = workplace.train(tmp_path, external.format("http://127.0.0.1:9"), expect=2)
    assert "no engine answers there" in refused
    with embedded_engine(workplace.folder / "model", log=tmp_path / "engine.log") as (url, process):
        holds_other_weights_of_version_0(url, build_tiny_model(tmp_path / "other", seed=1))
        out = workplace.train(tmp_path, external.format(url))
        assert "3 iterations complete" in out
        assert process.poll() is None
    assert final_weights(tmp_path / "a") == final_weights(whole)
