"""Engines that answer /generate at once with answers made before, as SGLang writes them: what asks them is measured, not they.

Owns the processes and the bytes. Knows nothing of what is done with an answer.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import orjson
from aiohttp import web

PROMPT = 128  # tokens
BODIES = 16  # different answers of an engine


def answer_body(seed: int, tokens: int) -> bytes:
    """An answer as SGLang writes it: log-probabilities that are float32 numbers, ids of a vocabulary of 150,000."""
    draw = np.random.default_rng(seed)
    logprobs = (-draw.exponential(0.5, tokens)).astype(np.float32).astype(float).tolist()
    ids = draw.integers(0, 150_000, tokens).tolist()
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": PROMPT,
        "weight_version": "0",
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
    }
    words = "".join(chr(97 + letter) for letter in draw.integers(0, 26, 4 * tokens))
    return orjson.dumps({"text": words, "output_ids": ids, "meta_info": meta})


def serve(port: Connection, seed: int, tokens: int, rate: float) -> None:
    """An engine: answers as often as `rate` tokens a second allow, 0 being at once. Sends its port."""
    bodies = [answer_body(seed * BODIES + number, tokens) for number in range(BODIES)]
    free_at, asked = 0.0, 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal free_at, asked
        await request.read()
        asked += 1
        body = bodies[asked % BODIES]
        if rate:
            free_at = max(free_at, time.monotonic()) + tokens / rate
            await asyncio.sleep(free_at - time.monotonic())
        return web.Response(body=body, content_type="application/json")

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"counters": {"tokens": asked}})

    async def run() -> None:
        app = web.Application(client_max_size=2**30)
        app.add_routes([web.post("/generate", generate), web.get("/server_info", info)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def engines(count: int, first: int, tokens: int, rate: float) -> Iterator[list[int]]:
    """Ports of so many engines in processes of their own, which end with it. first: seed of the first."""
    spawn = multiprocessing.get_context("spawn")
    started, ports = [], []
    try:
        for seed in range(first, first + count):
            ours, theirs = spawn.Pipe()
            engine = spawn.Process(target=serve, args=(theirs, seed, tokens, rate), daemon=True)
            engine.start()
            started.append(engine)
            ports.append(ours.recv())
        yield ports
    finally:
        for engine in started:
            engine.kill()
            engine.join()
