"""Engines that run outside the run: used by their address, waited for when they are gone, never believed without proof."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from millrace.connectors.engines.external import ExternalEngine
from millrace.connectors.engines.fleet import Fleet
from millrace.core.errors import EngineError
from millrace.flows.preflight.check_machine import engine_answers
from tests.support.engine_process import embedded_engine, reference_logprobs
from tests.support.local_handle import fleet_config

PROMPT = [10, 20, 30]
SHORT = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}


def fleet_at(model: Path, url: str, patience_s: float = 60, key: str | None = None) -> Fleet:
    engines = {"kind": "external", "addresses": [url], "start_timeout_s": patience_s, "key": key}
    config = fleet_config(model, engines=engines)

    async def handle(index: int) -> ExternalEngine:
        return ExternalEngine(config, index)

    return Fleet(config, handle)


@pytest_asyncio.fixture
async def closing() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


async def test_an_external_engine_serves_only_what_this_run_gave_it(
    tiny_model: Path,
    other_model: Path,
    tmp_path: Path,
    closing: contextlib.AsyncExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY_OF_THE_ENGINE", "s3cret")
    served = embedded_engine(other_model, "--weight-version", "3", log=tmp_path / "log", key="s3cret")
    with served as (url, process):
        shut_out = fleet_at(tiny_model, url)
        closing.push_async_callback(shut_out.close)
        with pytest.raises(EngineError, match="answered 401"):
            await shut_out.ensure(str(tiny_model))
        (problem,) = engine_answers(url, None)
        assert (problem.field, problem.reason[:10]) == ("engines.key", "the engine")
        assert not list(engine_answers(url, "${env:KEY_OF_THE_ENGINE}"))
        fleet = fleet_at(tiny_model, url, key="${env:KEY_OF_THE_ENGINE}")
        closing.push_async_callback(fleet.close)
        await fleet.ensure(str(tiny_model))
        assert fleet.unconfirmed(3) == [0]  # its 3 is not this run's
        await fleet.update_weights(str(tiny_model), 3)
        assert fleet.unconfirmed(3) == []

        async def recover(_: int) -> None:
            raise AssertionError("nothing was lost")

        found = await fleet.dispatcher(3, recover).generate(PROMPT, SHORT, rid="r", session=None)
        expected = reference_logprobs(tiny_model, PROMPT, found.output_ids.tolist())
        assert found.logprobs == pytest.approx(expected, abs=1e-4)
        await fleet.ensure(str(tiny_model))
        assert fleet.unconfirmed(3) == []
        assert process.poll() is None


@pytest.mark.slow
async def test_an_external_engine_that_is_gone_is_waited_for_and_given_the_weights_again(
    tiny_model: Path, tmp_path: Path, closing: contextlib.AsyncExitStack
) -> None:
    with embedded_engine(tiny_model, log=tmp_path / "first") as (url, _):
        fleet = fleet_at(tiny_model, url)
        closing.push_async_callback(fleet.close)
        await fleet.ensure(str(tiny_model))
        await fleet.update_weights(str(tiny_model), 1)
    (client,) = fleet._clients.values()
    with pytest.raises(EngineError) as lost:
        await client.flush()
    fleet.mark_suspect(client, lost.value)  # type: ignore[arg-type]
    waiting = asyncio.create_task(fleet.ensure(str(tiny_model)))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    port = url.rpartition(":")[2]
    with embedded_engine(tiny_model, "--port", port, log=tmp_path / "second"):
        await waiting
        assert fleet.unconfirmed(1) == [0]
        await fleet.update_weights(str(tiny_model), 1)
        assert fleet.unconfirmed(1) == []


async def test_one_that_does_not_come_is_named(tiny_model: Path) -> None:
    fleet = fleet_at(tiny_model, "http://127.0.0.1:9", patience_s=0.1)
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9 \(engines.addresses\) does not answer"):
        await fleet.ensure(str(tiny_model))
    await fleet.close()
