"""A run on an engine outside the run trains the same weights as a run that starts its own engine.

The last tests need a server of SGLang 0.5.23 or newer at MILLRACE_ENGINE_URL, which benchmarks/LOG.md starts on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.huggingface.tiny import build_tiny_model
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import Workplace, final_weights


def holds_weights_as_version_0(url: str, model: Path) -> None:
    """Loads a folder's weights; whose version 0 they are nobody can know."""

    async def load() -> None:
        client = SglangClient(url, "engine-0")
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
        holds_weights_as_version_0(url, build_tiny_model(tmp_path / "other", seed=1))
        out = workplace.train(tmp_path, external.format(url))
        assert "3 iterations complete" in out
        assert process.poll() is None
    assert final_weights(tmp_path / "a") == final_weights(whole)


@pytest.fixture
def server() -> Iterator[tuple[str, Path]]:
    """A server's address and the folder that it serves, before a run and after it."""
    url = os.environ.get("MILLRACE_ENGINE_URL")
    if url is None:
        pytest.skip("no server at MILLRACE_ENGINE_URL")
    with urllib.request.urlopen(f"{url}/model_info") as answer:
        model = Path(json.load(answer)["model_path"])
    yield url, model
    holds_weights_as_version_0(url, model)


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["retract", "keep"])
def test_requests_stay_at_a_server_while_its_weights_change(
    workplace: Workplace, server: tuple[str, Path], tmp_path: Path, on_update: str
) -> None:
    url, model = server
    out = workplace.train(
        tmp_path,
        f"engines={{kind: external, addresses: ['{url}']}}",
        f"model.path={model}",
        "rollout.sampling={max_new_tokens: 400, ignore_eos: true}",
        f"pipeline={{ahead: 1, on_update: {on_update}}}",
        "algorithm.correction.kind=truncate",
    )
    assert "3 iterations complete" in out
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", str(tmp_path))
    spans = [
        row
        for part in (tmp_path / "a").glob("iterations/*/rollouts/part-*.parquet")
        for row in pq.read_table(part, columns=["policy_versions"])["policy_versions"].to_pylist()
    ]
    assert any(len(row) > 1 for row in spans)
