"""An engine under contract: its client, what its kind promises, and what its answers are compared with."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.engines.client import Connect, EngineClient, GenerateRequest, Generation
from millrace.connectors.engines.fleet import Fleet
from millrace.core.config.engine_kinds import EngineKind
from millrace.core.contracts.handles import ServerState
from millrace.core.errors import EngineError
from tests.support.engine_process import CLOSE
from tests.support.local_handle import fleet_config

PROMPT = [10, 20, 30, 40, 50]
LONG = {"max_new_tokens": 1500, "temperature": 1.0, "ignore_eos": True}
SHORT = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
IDLE_S = 60.0
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Engine:
    """A running engine, which outlives its clients. It serves `model` as weight version `version` at first."""

    kind: EngineKind
    url: str
    key: str | None
    connect: Connect
    model: Path
    version: int
    reference: Callable[[Path, Sequence[int], Sequence[int]], list[float]]
    given: bool = False  # a server that somebody else started


class Contract:
    """One test's client of an engine, and the requests that it makes."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.kind = engine, engine.kind
        self.client: EngineClient = engine.connect(engine.url, "engine-0", engine.key)

    def request(self, rid: str = "r", ids: Sequence[int] = PROMPT, **fields: Any) -> GenerateRequest:
        """A request; what names no field of it are sampling parameters.

        Its id only starts with `rid`: SGLang ends any request that has a streamed request's id two seconds after that stream.
        """
        own = {
            name: fields.pop(name) for name in list(fields) if name in GenerateRequest.__dataclass_fields__
        }
        params = {**SHORT, **fields}
        return GenerateRequest(
            **{
                "input_ids": ids,
                "sampling_params": params,
                "rid": f"{rid}~{next(NUMBERS):05}",
                "progress_timeout_s": 60.0,
                **own,
            }
        )

    async def ask(self, rid: str = "r", ids: Sequence[int] = PROMPT, **fields: Any) -> Generation:
        return await self.client.generate(self.request(rid, ids, **fields))

    async def begun(self, *rids: str, **fields: Any) -> list[asyncio.Task[Generation]]:
        """Requests that have given a first token."""
        tasks = []
        for rid in rids:
            ready = asyncio.Event()

            def seen(_: Generation, ready: asyncio.Event = ready) -> bool:
                ready.set()
                return True

            asking = self.ask(rid, **{**LONG, "on_part": seen, "every": 8, **fields})
            tasks.append(asyncio.create_task(asking))
            waiting = asyncio.create_task(ready.wait())
            await asyncio.wait({tasks[-1], waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            assert not tasks[-1].done(), tasks[-1].result()
        return tasks

    async def idle(self) -> None:
        """Wait until no request runs; ends none."""
        async with asyncio.timeout(IDLE_S):
            while True:
                try:
                    return await self.client.flush()
                except EngineError:
                    await asyncio.sleep(0.05)

    async def restore(self) -> None:
        """The engine serves its first weights, and nothing else."""
        await self.client.resume()
        await self.client.abort()
        await self.idle()
        await self.client.weights.update_from_disk(str(self.engine.model), self.engine.version)

    def is_of(self, model: Path, answer: Generation, part: slice = slice(None)) -> bool:
        """Whether a model gives the log-probabilities of a part of an answer to PROMPT."""
        expected = self.engine.reference(model, PROMPT, answer.output_ids.tolist())
        return bool(answer.logprobs.tolist()[part] == pytest.approx(expected[part], abs=CLOSE))

    def fleet(self) -> Fleet:
        """A fleet of this engine alone, which runs outside the run."""
        config = fleet_config(self.engine.model, engines={"kind": "external", "addresses": [self.engine.url]})

        async def handle(_: int) -> StandingHandle:
            return StandingHandle(self.engine)

        return Fleet(config, handle, connect=self.engine.connect)


class StandingHandle:
    """An EngineHandle of an engine that stands."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def state(self) -> ServerState:
        at = self._engine
        return {"alive": True, "url": at.url, "key": at.key, "pid": None, "starts": 0, "log": ""}

    async def start(self, model: str) -> ServerState:
        return await self.state()

    async def kill(self) -> None:
        raise AssertionError("the engine answers")

    async def note_released(self, tags: list[str]) -> None:
        """Nothing is remembered."""

    async def download(self, url: str) -> str:
        raise AssertionError("weights come from a folder")

    async def trace_folder(self) -> str:
        raise AssertionError("a standing engine is not traced")

    async def store_trace(self, url: str) -> list[str]:
        return []

    async def remove_download(self) -> None:
        """Nothing was copied."""
