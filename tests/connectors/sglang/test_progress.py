"""When a request is given up: by what its engine was seen to make, looked at once for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import pytest

from millrace.connectors.engines.client import NO_TOKENS, GenerateRequest, Generation
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.engines.sglang.connection import Parse
from millrace.connectors.engines.watched import POLLS
from millrace.core.errors import EngineLostError, EngineStalledError

TIMEOUT_S = 0.8
ANSWER = {
    "text": "",
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "weight_version": "1",
        "output_token_logprobs": NO_TOKENS,
    },
}


class Scripted(SglangClient):
    """Answers requests after a time, and looks with what `state` says; as SGLang, it does not tell that it is paused."""

    def __init__(self, state: Callable[[int], Any], answers_after_s: float = 60.0) -> None:
        super().__init__("http://nowhere", "engine-0")
        self.looks = 0
        self._state = state
        self._answers_after_s = answers_after_s

    async def get(self, path: str, timeout_s: float) -> Any:
        if path == "/model_info":
            return {"weight_version": "3"}
        self.looks += 1
        return {"internal_states": self._state(self.looks)}

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        parse: Parse = orjson.loads,
    ) -> Any:
        await asyncio.sleep(self._answers_after_s if path == "/generate" else 0)
        return ANSWER

    async def ask(self) -> Generation:
        return await self.generate(
            GenerateRequest(input_ids=[1], sampling_params={}, rid="r", progress_timeout_s=TIMEOUT_S)
        )


def silent(_: int) -> Any:
    raise EngineLostError("engine-0: /server_info failed: TimeoutError")


async def test_a_stall_is_noticed_a_quarter_of_the_deadline_late() -> None:
    """The first look had nothing to compare with, so that a request waited for two deadlines."""
    started = time.monotonic()
    with pytest.raises(EngineStalledError):
        await Scripted(lambda _: "same").ask()
    assert TIMEOUT_S <= time.monotonic() - started < 1.75 * TIMEOUT_S


async def test_what_was_seen_before_a_request_does_not_count_against_it() -> None:
    engine = Scripted(lambda _: "same", answers_after_s=0.75 * TIMEOUT_S)
    await engine.ask()
    await asyncio.sleep(TIMEOUT_S)
    assert (await engine.ask()).finish == "stop"


async def test_one_look_serves_all_requests() -> None:
    engine = Scripted(lambda _: "same")
    found = await asyncio.gather(*(engine.ask() for _ in range(300)), return_exceptions=True)
    assert {type(error) for error in found} == {EngineStalledError}
    assert engine.looks <= 2 * POLLS


async def test_looks_that_fail_in_between_give_nothing_up() -> None:
    engine = Scripted(lambda look: silent(look) if look % 2 else look, answers_after_s=2 * TIMEOUT_S)
    assert (await engine.ask()).finish == "stop"


async def test_an_engine_that_answers_no_look_for_the_deadline_is_lost() -> None:
    started = time.monotonic()
    with pytest.raises(EngineLostError, match="/server_info failed"):
        await Scripted(silent).ask()
    assert time.monotonic() - started >= TIMEOUT_S


async def test_an_engine_that_this_client_paused_is_not_held_to_be_stalled() -> None:
    """SGLang 0.5.17 does not tell that it is paused, and was replaced for it."""
    engine = Scripted(lambda _: "same")
    await engine.pause()
    assert await engine.weight_version() is None
    with pytest.raises(EngineLostError, match="paused") as caught:
        await engine.ask()
    assert not isinstance(caught.value, EngineStalledError)
    await engine.resume()
    assert await engine.weight_version() == 3
    with pytest.raises(EngineStalledError):
        await engine.ask()
