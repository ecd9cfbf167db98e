"""Control of an engine by its protocol alone: weights, idleness, requests under way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_process import CLOSE, logprobs_of, reference_logprobs

PROMPT = [10, 20, 30, 40, 50]
LONG = {"max_new_tokens": 1500, "temperature": 1.0, "ignore_eos": True}
SHORT = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


async def load(http: Any, model: Path, version: str, *, flush: bool = True) -> Any:
    """Serve a folder. SGLang 0.5.17 ends if it holds requests, or has only just answered, when it is to flush its cache."""
    body = {"model_path": str(model), "weight_version": version, "flush_cache": flush}
    return await http.post("/update_weights_from_disk", body)


async def idle(http: Any) -> None:
    """Waits until nothing runs: only then is the cache flushed."""
    async with asyncio.timeout(60):
        while True:
            async with http.session.post(http.url + "/flush_cache") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)


def is_of(model: Path, answer: Any) -> bool:
    """Whether a model gives the log-probabilities of an answer to PROMPT."""
    expected = reference_logprobs(model, PROMPT, answer["output_ids"])
    return bool(logprobs_of(answer) == pytest.approx(expected, abs=CLOSE))


def versions_of(http: Any, answer: Any) -> set[str]:
    """Versions that an answer's tokens are of; SGLang 0.5.17 tells only that at its end."""
    meta = answer["meta_info"]
    if not http.own and "weight_versions" not in meta:
        return {meta["weight_version"]}
    return {span["version"] for span in meta["weight_versions"]}


async def begun(http: Any, *rids: str, **params: Any) -> list[asyncio.Task[Any]]:
    """Requests that have given a first token."""
    started = []
    for rid in rids:
        ready: asyncio.Event = asyncio.Event()
        started.append((asyncio.create_task(_follow(http, rid, ready, {**LONG, **params})), ready))
    for task, ready in started:
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert not task.done(), task.result()
    return [task for task, _ in started]


async def _follow(http: Any, rid: str, ready: asyncio.Event, params: dict[str, Any]) -> Any:
    import json

    body = {
        "input_ids": PROMPT,
        "sampling_params": params,
        "rid": rid,
        "return_logprob": True,
        "stream": True,
    }
    last: Any = None
    async with http.session.post(http.url + "/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            event = line.removeprefix(b"data:").strip()
            if event and event != b"[DONE]":
                last = json.loads(event)
                if last["output_ids"]:
                    ready.set()
    return last
