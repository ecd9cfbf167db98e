"""The server of SGLang's protocol whose answers are compared: the embedded engine, or a server at MILLRACE_ENGINE_URL.

What a client of any engine promises is in tests/connectors/engine_contract.

MILLRACE_ENGINE_KEY is the key that the server asks for, if it asks for one.

A server given by URL must serve a model folder that this machine can read (its /model_info names it), whose weights are one
model.safetensors. What only the embedded engine promises is marked `embedded_only`, with how SGLang differs. What SGLang
answers with is held to two versions: 0.5.17, which millrace runs, and 0.5.23.
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from tests.support.engine_control import idle, load
from tests.support.engine_process import embedded_engine

TIMEOUT_S = 120


@dataclass(frozen=True)
class Served:
    """Where the engine answers, and what it serves at first."""

    url: str
    own: bool  # the embedded engine, started by these tests
    model: Path
    version: str


class Http:
    """Calls of one test; every answer's status is looked at."""

    def __init__(self, session: aiohttp.ClientSession, served: Served) -> None:
        self.session = session
        self.url, self.own = served.url, served.own
        self.model, self.version = served.model, served.version

    async def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        status: int | tuple[int, ...] = 200,
        headers: dict[str, str] | None = None,
    ) -> Any:
        async with self.session.post(self.url + path, json=body or {}, headers=headers) as answer:
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
        self,
        input_ids: Any,
        *,
        status: int = 200,
        top: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        **params: Any,
    ) -> Any:
        """/generate with log-probabilities; `params` are sampling_params, `top` other fields."""
        body = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True, **(top or {})}
        return await self.post("/generate", body, status, headers)


def authorization() -> dict[str, str]:
    """The header by which a server at MILLRACE_ENGINE_URL knows its user."""
    key = os.environ.get("MILLRACE_ENGINE_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


@pytest.fixture(scope="session")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    given = os.environ.get("MILLRACE_ENGINE_URL")
    if given:
        request = urllib.request.Request(given.rstrip("/") + "/model_info", headers=authorization())
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            info = json.load(answer)
        yield Served(given.rstrip("/"), False, Path(info["model_path"]), info["weight_version"])
        return
    log = tmp_path_factory.mktemp("contract") / "engine.log"
    with embedded_engine(tiny_model, "--weight-version", "0", log=log) as (url, _):
        yield Served(url, True, tiny_model, "0")


@pytest_asyncio.fixture
async def http(served: Served) -> AsyncIterator[Http]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a server that answered 500 hangs up
    headers = authorization()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        client = Http(session, served)
        yield client
        await client.post("/continue_generation")
        await client.post("/abort_request", {"abort_all": True})


@pytest.fixture(autouse=True)
def only_where_promised(request: pytest.FixtureRequest, served: Served) -> None:
    """Leaves out at SGLang what is marked embedded_only."""
    marker = request.node.get_closest_marker("embedded_only")
    if marker and not served.own:
        pytest.skip(marker.args[0])


@pytest.fixture(scope="session")
def other_model(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape served with other weights: every tensor's rows moved on by one."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(served.model, folder)
    tensors = load_file(folder / "model.safetensors")
    moved = {name: tensor.roll(1, 0).contiguous() for name, tensor in tensors.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest_asyncio.fixture
async def restored(http: Any) -> AsyncIterator[None]:
    """The engine is idle, and serves its first weights again afterwards."""
    await idle(http)
    yield
    await http.post("/continue_generation")
    await http.post("/abort_request", {"abort_all": True})
    await idle(http)
    await load(http, http.model, http.version)
