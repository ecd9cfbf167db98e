"""All engines of a run: started, watched, restarted within their budget, and brought to a weight version.

Owns clients and who may serve (millrace.core.engine_health); the handles on the processes are given to it. An engine serves
only after it has confirmed the version it is meant to have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from millrace.connectors.sglang.client import EngineClient
from millrace.connectors.sglang.dispatcher import Dispatcher
from millrace.connectors.sglang.prefill import PairingDispatcher
from millrace.connectors.sglang.router import Handle, RoutedDispatcher, Router
from millrace.core.config import RunConfig
from millrace.core.engine_health import EngineHealth, Event, State
from millrace.core.errors import ActorLostError, EngineError, EngineLostError, EngineStalledError

log = logging.getLogger(__name__)
IDLE_TRIES, IDLE_WAIT_S = 200, 0.05
PROBE_TIMEOUT_S = 30.0  # SGLang's /health generates a token
PHASES = ("wake", "pause", "load", "resume", "confirm")
NAMED = 5  # how many of the tensors that differ are told
WEIGHTS, CACHE = "weights", "kv_cache"  # SGLang's names for what it can give back

Load = Callable[[Mapping[int, EngineClient], int], Awaitable[list[Any]]]
"""Loads a version into engines, by index; an answer or an error of each, in order."""


class Fleet:
    """The engines of one run."""

    def __init__(
        self,
        config: RunConfig,
        handle: Callable[[int], Awaitable[Handle]],
        router: Callable[[], Awaitable[Handle]] | None = None,
        make_room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`make_room` is called before an engine's process is started: SGLang sizes its KV cache by the memory it finds.

        Where engines rest (RunConfig.engines_sleep), one that has started gives its memory back at once.
        """
        self.config = config
        self.restarts = 0
        self._handle = handle
        self._make_room = make_room
        self._handles: dict[int, Handle] = {}
        self._clients: dict[int, EngineClient] = {}
        self._health = {index: EngineHealth() for index in range(config.engines.count)}
        self._released: dict[int, list[str]] = {}  # GPU memory that engines have given back
        self._model = config.model.path
        self._router = Router(router, self._count_restart) if router and config.engines.router else None

    # life

    async def ensure(self, model: str) -> None:
        """Have every engine's process running and answering, and the router's.

        Raises EngineError when the restart budget is spent. If one engine fails the others are waited for: nothing goes on
        starting engines after the error is told.
        """
        self._model = model
        results = await asyncio.gather(
            *(self._ensure_one(index) for index in self._health), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if self._router:
            await self._router.ensure([client.url for client in self._clients.values()])

    async def _ensure_one(self, index: int) -> None:
        while True:
            try:
                if index not in self._handles:
                    self._handles[index] = await self._handle(index)
                handle = self._handles[index]
                state = await self._alive(index, handle)
                started = not state["alive"]
                if started:
                    await self._drop(index)
                    if state["starts"]:
                        self._count_restart(f"engine {index}")
                    self._tell(index, Event.STARTED)
                    if self._make_room:
                        await self._make_room()
                    state = await handle.call("start", self._model)
                    if not await self._answers(index, state["url"]):
                        continue
                self._released[index] = state.get("released", [])
                if started and self.config.engines_sleep:
                    await self.sleep([index])
                return
            except ActorLostError as error:
                log.warning("engine %d: %s", index, error)
                self._handles.pop(index, None)
                await self._drop(index)
                self._count_restart(f"engine {index}")

    async def attach(self, handles: Mapping[int, Handle]) -> None:
        """Take up engines that run already, and start none. One that lives but does not answer is ended."""
        for index, handle in handles.items():
            self._handles[index] = handle
            try:
                state = await self._alive(index, handle)
            except ActorLostError as error:
                log.warning("engine %d: %s", index, error)
                continue
            self._released[index] = state.get("released", [])

    async def _alive(self, index: int, handle: Handle) -> dict[str, Any]:
        """State of an engine's process, which has been killed if it lived and did not answer."""
        state = await handle.state()
        if state["alive"] and not await self._answers(index, state["url"]):
            await handle.call("kill")
            state = await handle.state()
        return state

    async def _answers(self, index: int, url: str) -> bool:
        """Whether the engine at this URL answers; one that is new here, or was in doubt, says what it serves."""
        client = self._clients.get(index)
        new = client is None or client.url != url
        if client is None or client.url != url:
            state = self._health[index].state
            await self._drop(index, died=state is not State.STARTING)
            self._clients[index] = client = EngineClient(url, f"engine-{index}")
            if state is not State.STARTING:  # found running, or restarted by somebody else
                self._tell(index, Event.STARTED)
        elif self._health[index].state is State.DEAD:
            return False
        elif self._health[index].state is State.SERVING:
            return True
        try:
            if not await client.health(min(PROBE_TIMEOUT_S, self.config.rollout.progress_timeout_s)):
                raise EngineLostError(f"engine-{index}: does not answer to /health")
            version = await client.weight_version()
        except EngineLostError as error:
            log.warning("%s", error)
            return False
        if self._health[index].state is State.DEAD:  # a request on it was lost for good meanwhile
            return False
        self._tell(index, Event.ANSWERED)
        if version is not None and not (new and self.config.engines.kind == "external"):
            self._tell(index, Event.CONFIRMED, version)  # an external engine's number may be another run's
        return True

    def _count_restart(self, what: str) -> None:
        self.restarts += 1
        if self.restarts > self.config.engines.restarts:
            raise EngineError(
                f"{what} died and engines.restarts = {self.config.engines.restarts} is spent; see its log, raise "
                "the budget, and start the run again: what finished is kept"
            )
        log.warning("%s died: restart %d of %d", what, self.restarts, self.config.engines.restarts)

    async def _drop(self, index: int, died: bool = True) -> None:
        """Use this engine's connections no more; what is in flight on them is lost."""
        if died:
            self._tell(index, Event.DIED)
        client = self._clients.pop(index, None)
        if client:
            await client.close()

    def doubt(self, client: EngineClient, error: EngineLostError) -> None:
        """Send nothing to an engine that lost a request until `ensure` has looked at it; a stalled one is replaced."""
        for index, held in self._clients.items():
            if held is client:
                self._tell(index, Event.DIED if isinstance(error, EngineStalledError) else Event.LOST_REQUEST)

    def _tell(self, index: int, event: Event, version: int | None = None) -> None:
        self._health[index] = self._health[index].after(event, version)

    # weights

    def unconfirmed(self, version: int) -> list[int]:
        """Engines that have not confirmed a version."""
        return [index for index, health in self._health.items() if not health.serves(version)]

    async def publish(
        self, source: str | Load, version: int, only: list[int] | None = None
    ) -> dict[str, float]:
        """Load a version into engines and have each confirm it; seconds by phase. Requests in flight are kept.

        `source`: a Hugging Face folder or its URL, or what loads otherwise. An engine lost on the way is restarted and
        tried again, within the restart budget. Raises StorageError, with no engine touched, if a URL cannot be read.
        """
        left = only if only is not None else sorted(self._clients)
        seconds = dict.fromkeys(PHASES, 0.0)
        for _ in range(self.config.engines.restarts + 2):
            if not isinstance(source, str):
                load = source
            elif "://" in source:
                load = await self._copied(source, left, seconds)
            else:
                load = from_folder(source)
            await self._publish_once(load, version, left, seconds)
            left = [index for index in left if not self._health[index].serves(version)]
            if not left:
                return seconds
            await self.ensure(self._model)
        raise EngineError(f"engines {left} could not be brought to weight version {version}; see their logs")

    async def _copied(self, url: str, engines: list[int], seconds: dict[str, float]) -> Load:
        """Have a folder in storage copied to each engine's node, while it still generates; loads the copies, then drops them."""
        started = time.perf_counter()
        asked = [self._ask(index, "fetch", url) for index in engines]
        found = await asyncio.gather(*asked, return_exceptions=True)
        seconds["fetch"] = seconds.get("fetch", 0.0) + time.perf_counter() - started
        copies = dict(zip(engines, found, strict=True))
        for copy in found:
            if isinstance(copy, BaseException) and not isinstance(copy, EngineLostError):
                drops = [self._ask(index, "drop") for index in engines]
                await asyncio.gather(*drops, return_exceptions=True)
                raise copy

        async def one(index: int, client: EngineClient, version: int) -> None:
            copy = copies[index]
            if isinstance(copy, BaseException):
                raise copy
            try:
                await client.update_weights_from_disk(copy, version)
            finally:
                await self._ask(index, "drop")

        async def load(clients: Mapping[int, EngineClient], version: int) -> list[Any]:
            loads = [one(index, client, version) for index, client in clients.items()]
            return await asyncio.gather(*loads, return_exceptions=True)

        return load

    async def _ask(self, index: int, method: str, *args: Any) -> Any:
        """Ask the holder of an engine's process; its loss is the engine's."""
        try:
            return await self._handles[index].call(method, *args)
        except ActorLostError as error:
            raise EngineLostError(f"engine-{index}: {error}") from None

    async def _publish_once(
        self, load: Load, version: int, engines: list[int], seconds: dict[str, float]
    ) -> None:
        usable = [i for i in engines if i in self._clients and self._health[i].state is not State.DEAD]
        clients = {index: self._clients[index] for index in usable}
        for index in clients:
            self._tell(index, Event.REFIT)
        confirmed: dict[int, int | None] = {}

        async def confirm(client: EngineClient) -> None:
            confirmed[next(i for i, c in clients.items() if c is client)] = await client.weight_version()

        calls: dict[str, Load] = {
            "wake": _each(lambda client: self._take_memory(client, WEIGHTS)),
            "pause": _each(_stop),
            "load": load,
            "resume": _each(lambda client: client.resume()),
            "confirm": _each(confirm),
        }
        refusal: EngineError | None = None
        for phase in PHASES:
            started = time.perf_counter()
            results = await calls[phase](clients, version)
            seconds[phase] += time.perf_counter() - started
            for (index, client), result in zip(list(clients.items()), results, strict=True):
                if isinstance(result, EngineLostError):
                    log.warning("publishing weight version %d: %s", version, result)
                    self.doubt(client, result)
                    del clients[index]
                elif isinstance(result, EngineError):
                    refusal = result  # told after the engines go on
                elif isinstance(result, BaseException):
                    raise result
        if refusal:
            raise refusal
        for index, found in confirmed.items():
            if found != version:
                raise EngineError(f"engine-{index} confirms weight version {found}, {version} was published")
            if self._health[index].state is State.REFITTING:  # no request was lost on it meanwhile
                self._tell(index, Event.CONFIRMED, version)

    async def checksums(self, engines: list[int]) -> dict[int, Any]:
        """What each engine says of the tensors it holds."""
        found = await asyncio.gather(*(self._clients[index].weights_checksum() for index in engines))
        return dict(zip(engines, found, strict=True))

    async def verify(self, source: str, version: int, engines: list[int]) -> None:
        """Load a folder into engines that hold a version; raises EngineError if any holds other tensors then."""
        before = await self.checksums(engines)
        await self.publish(source, version, engines)
        after = await self.checksums(engines)
        told = []
        for index in engines:
            if before[index] != after[index]:
                names = differing(before[index], after[index])
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                told.append(f"engine-{index} in {', '.join(names[:NAMED]) or 'what it does not name'}{more}")
        if told:
            raise EngineError(
                f"engines held other weights of version {version} than the trainer's export: {'; '.join(told)}; with "
                "sync.kind=disk and sync.verify=false they hold the export"
            )

    # GPU memory

    async def sleep(self, only: list[int] | None = None) -> None:
        """Have idle engines give back their GPU memory; what still runs on one is ended. None serves until published to.

        The engine itself forgets its version, so that no driver, however late, takes it to hold those weights.
        """
        for index, client in list(self._clients.items()):
            if only is not None and index not in only:
                continue
            health = self._health[index]
            held = [tag for tag in (WEIGHTS, CACHE) if tag not in self._released.get(index, [])]
            if health.state not in (State.SERVING, State.REFITTING) or not held:
                continue
            try:
                await _idle(client)
                await client.forget_version()
                await self._note_released(index, [WEIGHTS, CACHE])
                await client.release_memory(held)
            except EngineLostError as error:
                self.doubt(client, error)
                continue
            self._tell(index, Event.REFIT)

    async def wake(self) -> bool:
        """Have engines take all their memory again, which must be free by now; False if none had given any back."""
        resting = [client for index, client in self._clients.items() if self._released.get(index)]
        results = await asyncio.gather(
            *(self._take_memory(client, WEIGHTS, CACHE) for client in resting), return_exceptions=True
        )
        for client, result in zip(resting, results, strict=True):
            if isinstance(result, EngineLostError):
                log.warning("%s", result)
                self.doubt(client, result)
            elif isinstance(result, BaseException):
                raise result
        return bool(resting)

    async def _take_memory(self, client: EngineClient, *tags: str) -> None:
        index = next(i for i, held in self._clients.items() if held is client)
        wanted = [tag for tag in self._released.get(index, []) if tag in tags]
        if wanted:
            try:
                await client.resume_memory(wanted)
            except EngineLostError as error:
                raise EngineLostError(f"{error}{self._no_room(wanted)}") from None
            await self._note_released(index, [tag for tag in self._released[index] if tag not in wanted])

    def _no_room(self, wanted: list[str]) -> str:
        """What SGLang, which ends when it finds too little, does not say."""
        ways = []
        if CACHE in wanted:
            share = self.config.engines.sglang.get("mem_fraction_static", "its default")
            ways.append(f"lower engines.sglang.mem_fraction_static (now {share})")
        if not self.config.placement.offload_trainer:
            ways.append("set placement.offload_trainer to true")
        return f"; if its log says that the GPU's memory ran out, {' or '.join(ways)}" if ways else ""

    async def _note_released(self, index: int, tags: list[str]) -> None:
        self._released[index] = tags
        await self._handles[index].call("note_released", tags)

    # requests

    def dispatcher(self, version: int, recover: Callable[[int], Awaitable[None]]) -> Dispatcher:
        """A dispatcher over the engines that serve a version."""
        rollout = self.config.rollout

        def of(engines: range) -> Callable[[], list[EngineClient]]:
            return lambda: [self._clients[i] for i in engines if self._health[i].serves(version)]

        settings: dict[str, Any] = {
            "version": version,
            "attempts": rollout.attempts,
            "progress_timeout_s": rollout.progress_timeout_s,
        }
        e = self.config.engines
        every = of(range(e.count))
        if self._router:
            return RoutedDispatcher(self._router, every, recover, self.doubt, **settings)
        if e.prefill:
            parts = of(range(e.prefill)), of(range(e.prefill, e.count))
            return PairingDispatcher(*parts, recover, self.doubt, **settings)
        return Dispatcher(every, recover, self.doubt, **settings)

    async def close(self) -> None:
        """Close connections; processes are left to their actors."""
        clients, self._clients = list(self._clients.values()), {}
        self._health = {index: EngineHealth() for index in self._health}
        await asyncio.gather(*(client.close() for client in clients))
        if self._router:
            await self._router.close()


def differing(one: Any, other: Any) -> list[str]:
    """Names of the tensors that differ in two answers with checksums; SGLang's has them once a GPU."""
    left, right = _tensors(one), _tensors(other)
    places = {**left, **right}
    return list(dict.fromkeys(place[-1] for place in places if left.get(place) != right.get(place)))


def _tensors(answer: Any, *place: str) -> dict[tuple[str, ...], Any]:
    """Every checksum of a tensor, by its place in the answer, which ends with the tensor's name."""
    if place and place[-1] == "checksums":
        return {(*place, name): value for name, value in answer.items()}
    items = (
        answer.items() if isinstance(answer, dict) else enumerate(answer) if isinstance(answer, list) else ()
    )
    return {key: value for name, below in items for key, value in _tensors(below, *place, str(name)).items()}


def from_folder(directory: str) -> Load:
    """Loads a Hugging Face folder that every engine can read."""

    async def load(clients: Mapping[int, EngineClient], version: int) -> list[Any]:
        return await _each(lambda client: client.update_weights_from_disk(directory, version))(
            clients, version
        )

    return load


def _each(call: Callable[[EngineClient], Awaitable[Any]]) -> Load:
    async def every(clients: Mapping[int, EngineClient], version: int) -> list[Any]:
        return list(await asyncio.gather(*map(call, clients.values()), return_exceptions=True))

    return every


async def _stop(client: EngineClient) -> None:
    """Pause an engine that nothing is left on: SGLang 0.5.17 ends when weights come while requests wait.

    None is of use that crosses a change of weights: those of a driver that died, or cancelled and not yet noticed.
    """
    await _idle(client)
    await client.pause("retract")


async def _idle(client: EngineClient) -> None:
    """End what runs on an engine and wait until nothing does: it refuses to forget cached prompts before."""
    await client.abort()
    for _ in range(IDLE_TRIES):
        try:
            return await client.flush()
        except EngineLostError:
            raise
        except EngineError:
            await asyncio.sleep(IDLE_WAIT_S)
    raise EngineLostError(f"{client.engine_id}: still busy after its requests were ended")
