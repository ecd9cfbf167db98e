"""The engine under contract: the embedded one, or any server that speaks SGLang's protocol at MILLRACE_ENGINE_URL.

A server given by URL must serve a model folder that this machine can read (its /model_info names it).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from engine_process import embedded_engine

TIMEOUT_S = 120


@dataclass(frozen=True)
class Served:
    """Where the engine answers, and what it serves."""

    url: str
    own: bool  # started by these tests


class Http:
    """Calls of one test; every answer's status is looked at."""

    def __init__(self, session: aiohttp.ClientSession, url: str, own: bool) -> None:
        self.session = session
        self.url = url
        self.own = own

    async def post(
        self, path: str, body: dict[str, Any] | None = None, status: int | tuple[int, ...] = 200
    ) -> Any:
        async with self.session.post(self.url + path, json=body or {}) as answer:
            text = await answer.text()
            wanted = status if isinstance(status, tuple) else (status,)
            assert answer.status in wanted, f"{path} answered {answer.status}: {text[:500]}"
            return await answer.json() if answer.content_type == "application/json" else text

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            text = await answer.text()
            assert answer.status == 200, f"{path} answered {answer.status}: {text[:500]}"
            return await answer.json() if answer.content_type == "application/json" else text

    async def generate(
        self, input_ids: Any, *, status: int = 200, top: dict[str, Any] | None = None, **params: Any
    ) -> Any:
        """/generate with log-probabilities; `params` are sampling_params, `top` other fields."""
        body = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True, **(top or {})}
        return await self.post("/generate", body, status)

    async def model(self) -> Path:
        """Folder of the model served."""
        for path in ("/model_info", "/get_model_info"):
            async with self.session.get(self.url + path) as answer:
                if answer.status == 200:
                    return Path((await answer.json())["model_path"])
        raise AssertionError("the engine does not name its model")


@pytest.fixture(scope="session")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    given = os.environ.get("MILLRACE_ENGINE_URL")
    if given:
        yield Served(given.rstrip("/"), own=False)
        return
    log = tmp_path_factory.mktemp("contract") / "engine.log"
    with embedded_engine(tiny_model, "--weight-version", "0", log=log) as (url, _):
        yield Served(url, own=True)


@pytest_asyncio.fixture
async def http(served: Served) -> AsyncIterator[Http]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a server that answered 500 hangs up
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Http(session, served.url, served.own)
        yield client
        await client.post("/continue_generation")
        await client.post("/abort_request", {"abort_all": True})


@pytest.fixture
def own_engine(served: Served) -> None:
    """Only for an engine that these tests started: what follows is this engine's own form."""
    if not served.own:
        pytest.skip("another form at SGLang's server")
