"""The embedded engine traces some of its steps, as SGLang does by /start_profile and /stop_profile."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from millrace.connectors.engines.client import GenerateRequest
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.errors import EngineError
from tests.support.engine_process import embedded_engine
from tests.support.local_handle import LocalHandle, fleet_config


def operations_of(file: Path) -> int:
    """Operations in a trace."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return sum(str(event.get("name")).startswith("aten::") for event in events)


async def test_a_trace_has_the_steps_that_were_asked_for_or_those_until_it_is_ended(
    tiny_model: Path, tmp_path: Path
) -> None:
    with embedded_engine(tiny_model, "--weight-version", "0", log=tmp_path / "log") as (url, _):
        client = SglangClient(url, "engine-0")

        async def generate(tokens: int) -> None:
            params = {"max_new_tokens": tokens, "ignore_eos": True}
            await client.generate(
                GenerateRequest(
                    input_ids=[1, 2, 3], sampling_params=params, rid=f"r-{tokens}", progress_timeout_s=60
                )
            )

        counts = []
        for number, (asked, made) in enumerate([(5, 20), (50, 21)]):
            folder = tmp_path / str(number)
            await client.start_trace(str(folder), asked)
            with pytest.raises(EngineError, match="a trace is under way"):
                await client.start_trace(str(folder), asked)
            await generate(made)
            await client.stop_trace()  # of the first it was over
            counts.append(operations_of(folder / "engine.trace.json.gz"))
        await client.stop_trace()
        with pytest.raises(EngineError, match="num_steps: a whole number from 1 "):
            await client.start_trace(str(tmp_path), 0)
        await client.close()
    assert 0 < 2 * counts[0] < counts[1]  # of 5 steps, and of 21


async def test_a_trace_that_is_never_started_stops_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with embedded_engine(tiny_model, log=tmp_path / "log") as (url, _):
        client = SglangClient(url, "engine-0")
        await asyncio.gather(client.stop_trace(), client.stop_trace())
        assert await client.health()
        await client.close()


async def test_a_holder_names_the_files_by_its_engine_and_moves_them(
    tiny_model: Path, tmp_path: Path
) -> None:
    handle = LocalHandle(fleet_config(tiny_model), 1)
    try:
        assert await handle.store_trace(str(tmp_path / "none")) == []
        folder = Path(await handle.trace_folder())
        for name in ("engine.trace.json.gz", "17-TP-0.trace.json.gz", "17-TP-1.trace.json.gz"):
            (folder / name).write_bytes(b"a trace")
        names = ["engine-1.17-TP-0.trace.json.gz", "engine-1.17-TP-1.trace.json.gz", "engine-1.trace.json.gz"]
        stored = await handle.store_trace(str(tmp_path / "traces"))
        assert sorted(Path(name).name for name in stored) == names
        assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == names
        assert not folder.exists()
    finally:
        handle.close()
