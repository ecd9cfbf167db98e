"""Memory of a shared GPU goes to and fro: the bytes really come back, and weights survive it."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from trainer_ranks import samples, write_batch

from benchmarks.gpu.shapes import SGLANG, configuration, model_folder, weight_bytes
from core.config import RunConfig
from flows.server import ensure_server, stop_server
from tasks.live import Live

SHARE = 0.3
STATE_BYTES = 16  # of a parameter: fp32 gradient, fp32 weight, two moments


def used() -> int:
    """Bytes of the GPU that are taken, by whomever."""
    free, whole = torch.cuda.mem_get_info(0)
    return int(whole - free)


def total() -> int:
    return int(torch.cuda.mem_get_info(0)[1])


@pytest_asyncio.fixture
async def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Live]:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_API_URL", ensure_server())
    model = model_folder("0.6b", tmp_path / "0.6b")
    sglang = {**SGLANG, "mem_fraction_static": SHARE, "cuda_graph_max_bs_decode": 16}
    values = configuration(
        model,
        tmp_path,
        run={"name": "memory", "iterations": 3},
        engines={"kind": "sglang", "sglang": {**sglang, "load_format": "dummy"}},
        rollout={"prompts": 1, "samples_per_prompt": 8, "sampling": {"max_new_tokens": 16}},
        sync={"kind": "ipc"},
    )
    made = Live(RunConfig.model_validate(values))
    await made.open()
    yield made
    await made.close(end_actors=True)
    stop_server()
    os.environ.pop("PREFECT_API_URL", None)


async def test_the_bytes_come_back_to_whoever_works(live: Live, tmp_path: Path) -> None:
    prompt: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    engines = await live.engines(0)
    before = await engines.generate([10, 20, 30], prompt, rid="before", session=None)
    serving = used()

    await live.rest_engines()
    resting = used()
    assert serving - resting > 0.8 * SHARE * total()  # weights and KV cache

    trainer = await live.trainer(0)
    batch = write_batch(tmp_path / "batch", samples(1, logprob=-math.log(151936)))
    await trainer.call("train", 1, batch, None)
    training = used()
    freed = (await trainer.call("park"))[0]
    parked = used()
    parameters = weight_bytes(tmp_path / "0.6b") // 2
    assert freed > 0.95 * STATE_BYTES * parameters
    assert training - parked == pytest.approx(freed, rel=0.05)

    engines = await live.engines(1)
    assert used() == pytest.approx(serving, rel=0.1)
    after = await engines.generate([10, 20, 30], prompt, rid="after", session=None)
    assert after.weight_versions[0][1] == 1
    assert len(after.output_ids) == len(before.output_ids) == 8

    second = write_batch(tmp_path / "second", samples(2, logprob=-math.log(151936)))
    await live.rest_engines()
    answer = (await (await live.trainer(1)).call("train", 2, second, None))[0]
    assert math.isfinite(answer["grad_norm"])  # the optimizer's state came back
