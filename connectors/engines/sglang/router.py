"""Sends requests through sglang-router: keeps its process running, and its workers equal to the engines that serve.

Owns the code between a dispatcher and the router; the router's policy chooses the engine. Version 0.3.2 parses a request and
writes it again, without fields that it does not know and with numbers in 32 bits. It returns the answer unchanged. It has no
control endpoints and does not report which engine answered. Requests on a removed worker run to their end; if a client disconnects,
its request ends at the engine.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millrace.connectors.engines.client import EngineClient, GenerateRequest, Generation
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.engines.watched import POLLS
from millrace.core.contracts.handles import RouterHandle, ServerState
from millrace.core.errors import ActorLostError, EngineError, EngineLostError

log = logging.getLogger(__name__)
NAME = "sglang-router"
Keys = Mapping[str, str | None]  # each engine's key, by its URL
PROBE_TIMEOUT_S = 10.0
SETTLE_TIMEOUT_S, SETTLE_WAIT_S = 10.0, 0.005
# sampling_params that the router passes on; it drops others silently.
PASSED = {
    *("temperature", "top_p", "top_k", "min_p", "sampling_seed", "n", "max_new_tokens", "min_new_tokens"),
    *("stop", "stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens", "json_schema", "regex"),
    *("ebnf", "frequency_penalty", "presence_penalty", "repetition_penalty"),
}


class RouterClient(SglangClient):
    """The router at a base URL."""

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Its workers as it reports them, by URL."""
        answer = await self.get("/workers", PROBE_TIMEOUT_S)
        return {worker["url"]: worker for worker in answer["workers"]}

    async def add(self, url: str, key: str | None) -> None:
        """Ask the router to add a worker with its key. It takes effect some time later."""
        body = {"url": url, **({"api_key": key} if key else {})}
        await self.post("/workers", body, PROBE_TIMEOUT_S)

    async def remove(self, worker_id: str) -> None:
        """Ask the router to send a worker no more requests; its running requests continue."""
        await self.send("DELETE", f"/workers/{worker_id}", None, PROBE_TIMEOUT_S)


class RunRouter:
    """The router of a run."""

    def __init__(
        self, handle: Callable[[], Awaitable[RouterHandle]], restarting: Callable[[str, str], None]
    ) -> None:
        self._find = handle
        self._restarting = restarting
        self._handle: RouterHandle | None = None
        self._client: RouterClient | None = None
        self._workers: Keys | None = None  # as last seen; None: ask the router
        self._added: dict[str, str | None] = {}  # keys by the added workers' URLs
        self._settling = asyncio.Lock()

    async def ensure(self, engines: Keys) -> None:
        """Make the router run and answer. A new one gets these engines."""
        while True:
            try:
                if self._handle is None:
                    self._handle = await self._find()
                state = await self._handle.state()
                if state["alive"] and not await self._answers(state):
                    await self._handle.kill()
                    state = await self._handle.state()
                if state["alive"]:
                    return
                if state["starts"]:
                    self._restarting("router", "its process ended or did not answer")
                self._workers = None
                state = await self._handle.start()
                if await self._answers(state):
                    async with self._settling:
                        await self._settle(engines)
            except EngineLostError as error:
                log.warning("%s", error)
            except ActorLostError as error:
                log.warning("%s: %s", NAME, error)
                self._handle = None
                self._restarting("router", str(error))

    async def _answers(self, state: ServerState) -> bool:
        url, key = state["url"], state["key"]
        assert url is not None, "a router that lives has a URL"
        if self._client is None or (self._client.url, self._client.key) != (url, key):
            await self.close()
            self._client = RouterClient(url, NAME, key)
        return await self._client.health(PROBE_TIMEOUT_S)

    async def send_to(self, engines: Callable[[], Sequence[EngineClient]]) -> RouterClient:
        """Wait until the router's workers are the engines that serve, and return it. Raises EngineLostError if that fails."""
        async with self._settling:
            wanted = {engine.url: engine.key for engine in engines()}
            if not wanted or self._client is None:
                raise EngineLostError(f"{NAME}: no engine serves")
            if wanted != self._workers:
                self._workers = None
                await self._settle(wanted)
                self._workers = wanted
            return self._client

    async def _settle(self, wanted: Keys) -> None:
        """Wait until the workers are the wanted ones. A worker whose key has changed is removed and added again."""
        client = self._client
        assert client is not None
        asked: set[str] = set()
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while True:
                    found = await client.workers()
                    here = {url for url in found if self._added.get(url, wanted.get(url)) == wanted.get(url)}
                    fits = here == found.keys() == wanted.keys()
                    if fits and all(worker["is_healthy"] for worker in found.values()):
                        return
                    for url in wanted.keys() - found.keys() - asked:
                        await client.add(url, wanted[url])
                        self._added[url] = wanted[url]
                    for url in (found.keys() - (wanted.keys() & here)) - asked:
                        await client.remove(found[url]["id"])
                        self._added.pop(url, None)
                    asked |= wanted.keys() ^ found.keys()
                    await asyncio.sleep(SETTLE_WAIT_S)
        except TimeoutError:
            raise EngineLostError(
                f"{NAME}: its workers are not those that serve after {SETTLE_TIMEOUT_S:g} s"
            ) from None

    async def health(self, timeout_s: float) -> bool:
        """Whether it answers."""
        return self._client is not None and await self._client.health(timeout_s)

    async def close(self) -> None:
        """Close connections. The process stays with its actor."""
        client, self._client, self._workers, self._added = self._client, None, None, {}
        if client:
            await client.close()


class RoutedDispatcher(Dispatcher):
    """Generates through the router. It does not tell which engine has a request, so a lost request makes all engines suspect."""

    def __init__(
        self,
        router: RunRouter,
        engines: Callable[[], Sequence[EngineClient]],
        recover: Callable[[int], Awaitable[None]],
        mark_suspect: Callable[[EngineClient, EngineLostError], None],
        **settings: Any,
    ) -> None:
        def suspect_all(_: EngineClient, error: EngineLostError) -> None:
            for engine in engines():
                mark_suspect(engine, error)

        super().__init__(engines, recover, suspect_all, **settings)
        self._router = router
        self._mark_one_suspect = mark_suspect
        self._began = time.monotonic()
        self._checked_at = 0.0
        self._checking = asyncio.Lock()

    async def _ask(self, engine: EngineClient, request: GenerateRequest) -> Generation:
        assert request.on_part is None, f"{NAME} drops stream_interval"
        dropped = sorted(set(request.sampling_params) - PASSED)
        if dropped:
            raise EngineError(
                f"{NAME} drops sampling_params.{dropped[0]}; leave engines.router out to use it"
            )
        client = await self._router.send_to(self._engines)
        # the engines' weights may have changed meanwhile
        cache_key = self._cache_key(engine)
        return await client.generate(replace(request, check=self._check_progress, cache_key=cache_key))

    def _holders(self, engine: EngineClient) -> Sequence[EngineClient]:
        return self._engines()

    async def _check_progress(self, sent: float, timeout_s: float) -> None:
        """Check that engines generate, each once per period for all callers. An engine without progress becomes suspect; its
        requests are reported as lost when it is replaced. Raises EngineLostError if the router is gone."""
        async with self._checking:
            if time.monotonic() - self._checked_at < timeout_s / POLLS:
                return
            if not await self._router.health(min(timeout_s, PROBE_TIMEOUT_S)):
                raise EngineLostError(f"{NAME}: does not answer to /health")
            engines = self._engines()
            errors = await asyncio.gather(*(self._stuck(engine, timeout_s) for engine in engines))
            for engine, error in zip(engines, errors, strict=True):
                if error:
                    log.warning("%s", error)
                    self._mark_one_suspect(engine, error)
            if any(errors):
                await self._recover(self.version)
            self._checked_at = time.monotonic()

    async def _stuck(self, engine: EngineClient, timeout_s: float) -> EngineLostError | None:
        """The error for an engine that made no token for timeout_s and makes none now; None if it works."""
        try:
            moved, paused = await engine.last_moved(self._began, timeout_s)
        except EngineLostError as error:
            return error
        waited = time.monotonic() - moved
        if waited < timeout_s or (not paused and await engine.health(timeout_s, generating=True)):
            return None
        return engine.no_progress(timeout_s, paused)
