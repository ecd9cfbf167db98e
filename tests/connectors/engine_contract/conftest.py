"""The engines under contract: the embedded one and an echo; or the server at MILLRACE_ENGINE_URL, which speaks SGLang's protocol.

A server given by URL must serve a model folder that this machine can read (its /model_info names it), whose weights are one
model.safetensors. MILLRACE_ENGINE_KEY is the key that it asks for. It is held to be SGLang, 0.5.17 or 0.5.23.
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.config.engine_kinds import EMBEDDED, SGLANG
from tests.support.contract import Contract, Engine
from tests.support.echo_engine import ECHO, EchoServer, connect, echo_logprobs
from tests.support.engine_process import embedded_engine, reference_logprobs

GIVEN = os.environ.get("MILLRACE_ENGINE_URL", "").rstrip("/")
TIMEOUT_S = 120
OPTIONS = ("--weight-version", "0", "--max-loaded-loras", "6")
Starts = Callable[[Path, Path], AbstractContextManager[Engine]]


@contextmanager
def embedded(model: Path, folder: Path) -> Iterator[Engine]:
    with embedded_engine(model, *OPTIONS, log=folder / "engine.log") as (url, _):
        yield Engine(EMBEDDED, url, None, SglangClient, model, 0, reference_logprobs)


@contextmanager
def echo(model: Path, folder: Path) -> Iterator[Engine]:
    client = partial(connect, EchoServer(model, "0"))
    yield Engine(ECHO, "http://127.0.0.1:1", None, client, model, 0, echo_logprobs)


@contextmanager
def given(_: Path, folder: Path) -> Iterator[Engine]:
    key = os.environ.get("MILLRACE_ENGINE_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{GIVEN}/model_info", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        model = Path(json.load(answer)["model_path"])
    yield Engine(SGLANG, GIVEN, key, SglangClient, model, 0, reference_logprobs, given=True)


ENGINES: dict[str, Starts] = {"given": given} if GIVEN else {"embedded": embedded, "echo": echo}


@pytest.fixture(scope="session", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with ENGINES[request.param](tiny_model, tmp_path_factory.mktemp("contract")) as started:
        yield started


@pytest.fixture(scope="session")
def other_model(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape served with other weights: every tensor's rows moved on by one."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(engine.model, folder)
    tensors = load_file(folder / "model.safetensors")
    moved = {name: tensor.roll(1, 0).contiguous() for name, tensor in tensors.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest_asyncio.fixture
async def on(engine: Engine) -> AsyncIterator[Contract]:
    """The engine, idle and with its first weights."""
    contract = Contract(engine)
    await contract.restore()
    yield contract
    await contract.client.close()


@pytest.fixture(autouse=True)
def only_where_promised(request: pytest.FixtureRequest, engine: Engine) -> None:
    """Leaves out at SGLang what is marked embedded_only."""
    marker = request.node.get_closest_marker("embedded_only")
    if marker and engine.given:
        pytest.skip(marker.args[0])
