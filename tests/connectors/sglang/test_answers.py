"""Answers of an engine that no step may be trained on are refused where they enter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from millrace.connectors.engines.client import GenerateRequest, OutputTokens
from millrace.connectors.engines.dispatcher import Dispatcher, request_id
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.config import RunConfig
from millrace.core.errors import EngineError, EngineLostError
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.generation.single_samples import SampleGenerator

ASKED = GenerateRequest(input_ids=[1], sampling_params={}, rid="r", progress_timeout_s=9.0)


class Answering(SglangClient):
    """Answers with these log-probabilities."""

    def __init__(self, *logprobs: float | None) -> None:
        super().__init__("http://nowhere", "engine-3")
        self.logprobs = logprobs

    async def post(self, path: str, body: dict[str, Any], *_: Any, **__: Any) -> Any:
        ids = np.full(len(self.logprobs), 7, dtype=np.int32)
        tokens = OutputTokens(ids, np.array(self.logprobs, dtype=np.float64))
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": tokens}
        return {"text": "x", "meta_info": meta}


def config() -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"sources": [{"path": "p.jsonl"}]}}
    )


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, None])
async def test_a_log_probability_that_is_not_finite_fails_its_sample_naming_engine_sample_and_token(
    wrong: float | None,
) -> None:
    async def never(_: Any, __: Any = None) -> None:
        raise AssertionError("the engine is not to blame for one answer")

    async def ready() -> Dispatcher:
        return Dispatcher(
            lambda: [engine],
            never,
            never,
            version=1,
            attempts=3,
            progress_timeout_s=9.0,  # type: ignore[arg-type]
        )

    engine = Answering(-0.5, wrong)
    with pytest.raises(EngineError, match=r"request s-0001~00: engine-3: .*output token 1 is") as caught:
        await engine.generate(replace(ASKED, rid=request_id("s-0001", 0, "5f2e9c")))
    assert not isinstance(caught.value, EngineLostError)
    budget = FailureBudget("", 1.0, 1, what="failed", where="iteration 1", remedy="")
    samples = SampleGenerator(config(), config().rollout.sampling, ready, budget)
    answer = await samples.generate([1], seed=0, rid="s-0001", session=None)
    assert answer.status == "failed"
    assert answer.reason == str(caught.value)


async def test_finite_log_probabilities_are_taken_as_they_are() -> None:
    generation = await Answering(-0.5, 0.0, -80.0).generate(ASKED)
    assert generation.logprobs.tolist() == [-0.5, 0.0, -80.0]


ABORTED = {  # finish reasons of SGLang 0.5.17 and of the embedded engine, and whether the engine failed
    "while it ran": ({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, False),
    "while it waited": ({"type": "abort", "message": "Abort in waiting queue"}, False),
    "embedded": ({"type": "abort", "message": "aborted by request", "status_code": 200}, False),
    "out of memory": ({"type": "abort", "message": "no room", "status_code": 503}, True),
}


@pytest.mark.parametrize("case", ABORTED)
async def test_a_request_that_was_ended_as_asked_is_no_fault_of_its_engine(case: str) -> None:
    """SGLang gives no status then: engines were held to be lost, and what they had made was thrown away."""
    reason, failed = ABORTED[case]
    body = {
        "text": "x",
        "output_ids": [7],
        "meta_info": {
            "finish_reason": reason,
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, 7, None]],
        },
    }

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body)

    app = web.Application()
    app.router.add_post("/generate", answer)
    async with TestServer(app) as server:
        client = SglangClient(str(server.make_url("")).rstrip("/"), "engine-3")
        try:
            if failed:
                with pytest.raises(EngineLostError, match="no room"):
                    await client.generate(ASKED)
            else:
                cut = await client.generate(ASKED)
                assert (cut.finish, cut.output_ids.tolist()) == ("abort", [7])
        finally:
            await client.close()


async def test_an_answer_that_is_no_json_is_an_error_of_its_engine() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text='{"value": NaN}', content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", answer)
    async with TestServer(app) as server:
        client = SglangClient(str(server.make_url("")).rstrip("/"), "engine-3")
        try:
            with pytest.raises(EngineError, match="engine-3: /generate answered with no JSON"):
                await client.generate(ASKED)
        finally:
            await client.close()
