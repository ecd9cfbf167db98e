"""All engines of a run: starts, watches and restarts them within their budget, and brings them to a weight version.

Owns clients and which engine may serve (core.engine_health); the caller provides the processes' handles. An engine serves only
after it has confirmed the version that it should have.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from millrace.connectors.engines.client import CACHE, WEIGHTS, Connect, EngineClient
from millrace.connectors.engines.dispatcher import Dispatcher, until_changed
from millrace.connectors.engines.kinds import connect_to
from millrace.connectors.engines.prefill import PairingDispatcher
from millrace.connectors.engines.sglang.router import RoutedDispatcher, RunRouter
from millrace.connectors.engines.weight_update import (
    Load,
    each,
    idle,
    load_from_folder,
    load_from_storage,
    pause_for_update,
)
from millrace.connectors.host.local_files import log_folder
from millrace.core.config import RunConfig
from millrace.core.config.engine_kinds import SGLANG
from millrace.core.config.pipeline import OnUpdate
from millrace.core.contracts.failures import RestartBudget
from millrace.core.contracts.handles import EngineHandle, RouterHandle, ServerState
from millrace.core.contracts.progress import starting
from millrace.core.engine_health import EngineEvent, EngineHealth, EngineState
from millrace.core.errors import (
    ActorLostError,
    EngineError,
    EngineLostError,
    EngineStalledError,
    StorageError,
)

log = logging.getLogger(__name__)
PROBE_TIMEOUT_S = 30.0  # SGLang's /health generates a token
PHASES = ("wake", "pause", "load", "resume", "confirm")


class Fleet:
    """The engines of one run."""

    def __init__(
        self,
        config: RunConfig,
        handle: Callable[[int], Awaitable[EngineHandle]],
        router: Callable[[], Awaitable[RouterHandle]] | None = None,
        make_room: Callable[[], Awaitable[None]] | None = None,
        connect: Connect | None = None,
        owner: str = "run",
    ) -> None:
        """connect: makes a client, by default of the configured kind of engine. owner: names the run where several share an engine.

        `make_room` is called before an engine's process starts, since SGLang sizes its KV cache by the free memory.

        If engines sleep (RunConfig.engines_sleep), an engine releases its memory right after its start.
        """
        self.config = config
        self._logs = partial(log_folder, config.storage.root, config.run.name)
        self._restarts = RestartBudget(config.engines.restarts, self._logs)
        self._lost: dict[int, str] = {}  # why an engine is replaced, by index
        self._handle = handle
        self._make_room = make_room
        self._connect = connect or connect_to(config.engines)
        self._owner = owner
        self._handles: dict[int, EngineHandle] = {}
        self._clients: dict[int, EngineClient] = {}
        self._health = {index: EngineHealth() for index in range(config.engines.count)}
        self._traced: set[int] = set()  # engines that make a trace
        self._changes = 0  # of any engine's health, which also changes when an engine gets another client
        self._released: dict[int, list[str]] = {}  # tags of GPU memory that engines have released
        self._model = config.model.path
        self._router = RunRouter(router, self._restarts.count) if router and config.engines.router else None

    @property
    def restarts(self) -> int:
        """Restarts so far, of engines and router."""
        return self._restarts.deaths.total

    # life

    async def ensure(self, model: str) -> None:
        """Make every engine's process, and the router's, run and answer. Afterwards no engine is suspect.

        Raises BudgetError when the restart budget is spent. After an error it still waits for the others, so that none is starting.
        """
        self._model = model
        for result in await asyncio.gather(*map(self._ensure_one, self._health), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        if any(health.state is EngineState.SUSPECT for health in self._health.values()):
            # an engine lost a request meanwhile, and must be checked again before it may serve
            await self.ensure(model)
        elif self._router:
            await self._router.ensure({client.url: client.key for client in self._clients.values()})

    def _kernels(self) -> str:
        """The cache of compiled kernels that an engine starts with, for the line that says so; empty without one."""
        url = self.config.placement.kernel_cache
        return f" (with kernels of {url})" if url and SGLANG in self.config.engines.kinds else ""

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
                        self._restarts.count(f"engine-{index}", self._lost.pop(index, "its process ended"))
                    self._record_event(index, EngineEvent.STARTED)
                    if self._make_room:
                        await self._make_room()
                    try:
                        with starting(log, f"engine-{index}{self._kernels()}"):
                            state = await handle.start(self._model)
                    except EngineLostError:  # killed during its start, which counts as a death
                        continue
                    if not await self._answers(index, state):
                        continue
                self._released[index] = state.get("released", [])
                if started and self.config.engines_sleep:
                    await self.sleep([index])
                return
            except ActorLostError as error:
                log.warning("engine %d: %s", index, error)
                self._handles.pop(index, None)
                await self._drop(index)
                self._restarts.count(f"engine-{index}", str(error))

    async def attach(self, handles: Mapping[int, EngineHandle]) -> None:
        """Adopt running engines, without starting any. An engine that lives but does not answer is killed."""
        for index, handle in handles.items():
            self._handles[index] = handle
            try:
                state = await self._alive(index, handle)
            except ActorLostError as error:
                log.warning("engine %d: %s", index, error)
                continue
            self._released[index] = state.get("released", [])

    async def _alive(self, index: int, handle: EngineHandle) -> ServerState:
        """The state of an engine's process. A process that lives but does not answer is killed first."""
        state = await handle.state()
        if state["alive"] and not await self._answers(index, state):
            await handle.kill()
            state = await handle.state()
        return state

    async def _answers(self, index: int, state: ServerState) -> bool:
        """Whether the engine answers. A new or suspect engine is asked for the version that it serves."""
        url, key = state["url"], state["key"]
        assert url is not None, "an engine that lives has a URL"
        client = self._clients.get(index)
        new = client is None or (client.url, client.key) != (url, key)
        if client is None or new:
            health = self._health[index].state
            await self._drop(index, died=health is not EngineState.STARTING)
            self._clients[index] = client = self._connect(url, f"engine-{index}", key)
            if self.config.adapters_by_name:
                client.weights.serve_by_name(self._owner, alone=self.config.engines.started)
            if health is not EngineState.STARTING:  # found running, or restarted by another process
                self._record_event(index, EngineEvent.STARTED)
        elif self._health[index].state is EngineState.DEAD:
            return False
        elif self._health[index].state is EngineState.SERVING:
            return True
        try:
            if not await client.health(min(PROBE_TIMEOUT_S, self.config.rollout.progress_timeout_s)):
                raise EngineLostError(f"engine-{index}: does not answer to /health")
            version = await client.weight_version()
            if new and self.config.adapters_by_name and not self.config.engines.started:
                await client.check_holds_adapters(self.config.adapter_slots)
        except EngineLostError as error:
            log.warning("%s", error)
            self._lost[index] = str(error)
            return False
        if self._health[index].state is EngineState.DEAD:  # meanwhile a request on it stalled
            return False
        self._lost.pop(index, None)
        self._record_event(index, EngineEvent.ANSWERED)
        if version is not None and (self.config.engines.started or not new):
            # the version of a new external engine may be another run's number
            self._record_event(index, EngineEvent.CONFIRMED, version)
        return True

    async def _drop(self, index: int, died: bool = True) -> None:
        """Close this engine's connections; requests in flight on them are lost."""
        if died:
            self._record_event(index, EngineEvent.DIED)
        client = self._clients.pop(index, None)
        if client:
            await client.close()

    def mark_suspect(self, client: EngineClient, error: EngineLostError) -> None:
        """Send no requests to an engine that lost one until `ensure` has checked it. A stalled engine is replaced."""
        for index, held in self._clients.items():
            if held is client:
                self._lost[index] = str(error)
                self._record_event(
                    index,
                    EngineEvent.DIED if isinstance(error, EngineStalledError) else EngineEvent.LOST_REQUEST,
                )

    def _record_event(self, index: int, event: EngineEvent, version: int | None = None) -> None:
        self._health[index] = self._health[index].after(event, version)
        self._changes += 1

    # weights

    def unconfirmed(self, version: int, oldest: int | None = None) -> list[int]:
        """Engines that have not confirmed `version`; with `oldest`, engines that have confirmed none from `oldest` to `version`."""
        allowed = range(version if oldest is None else oldest, version + 1)
        return [i for i, health in self._health.items() if not any(map(health.serves, allowed))]

    async def update_weights(
        self,
        source: str | Load,
        version: int,
        only: list[int] | None = None,
        on_update: OnUpdate = "finish",
    ) -> dict[str, float]:
        """Load a version into engines and let each confirm it; returns seconds by phase.

        on_update: the treatment of requests in flight. With finish none of them matters; with resend their dispatchers send them
        again; with retract and keep the engine keeps them, and EngineError is raised if it cannot.
        `source`: a Hugging Face folder or its URL, or another way to load. An engine lost meanwhile is restarted and updated again,
        within the restart budget. Raises StorageError, before any engine is touched, if a URL cannot be read.
        """
        left = only if only is not None else sorted(self._clients)
        seconds = dict.fromkeys(PHASES, 0.0)
        for _ in range(self.config.engines.restarts + 2):
            if not isinstance(source, str):
                load = source
            elif "://" in source:
                handles = {index: self._handles[index] for index in left}
                load = await load_from_storage(source, handles, seconds)
            else:
                load = load_from_folder(source)
            await self._update_once(load, version, left, seconds, on_update)
            left = [index for index in left if not self._health[index].serves(version)]
            if not left:
                return seconds
            await self.ensure(self._model)
        raise EngineError(
            f"engines {left} could not be brought to weight version {version} in {self.config.engines.restarts + 2} tries",
            remedy=f"see engine-{left[0]}.log in {self._logs()} for the cause, and start the same command again",
        )

    async def _update_once(
        self, load: Load, version: int, engines: list[int], seconds: dict[str, float], on_update: OnUpdate
    ) -> None:
        usable = [i for i in engines if i in self._clients and self._health[i].state is not EngineState.DEAD]
        clients = {index: self._clients[index] for index in usable}
        numbers = {client: index for index, client in clients.items()}
        for index, client in clients.items():
            self._record_event(index, EngineEvent.REFIT)
            client.note_refit()
            client.weights.flushes = on_update != "keep"
        confirmed: dict[int, int | None] = {}

        async def confirm(client: EngineClient) -> None:
            confirmed[numbers[client]] = await client.weight_version()

        calls: dict[str, Load] = {
            "wake": each(lambda client: self._take_memory(client, WEIGHTS)),
            "pause": each(partial(pause_for_update, on_update=on_update)),
            "load": load,
            "resume": each(lambda client: client.resume()),
            "confirm": each(confirm),
        }
        refusal: EngineError | None = None
        for phase in PHASES:
            started = time.perf_counter()
            results = await calls[phase](clients, version)
            seconds[phase] += time.perf_counter() - started
            for (index, client), result in zip(list(clients.items()), results, strict=True):
                if isinstance(result, EngineLostError):
                    log.warning("update to weight version %d: %s", version, result)
                    self.mark_suspect(client, result)
                    del clients[index]
                elif isinstance(result, EngineError):
                    refusal = result  # raised once the engines have resumed
                elif isinstance(result, BaseException):
                    raise result
        if refusal:
            raise refusal
        for index, answer in confirmed.items():
            if answer != version:
                raise EngineError(
                    f"engine-{index} confirms weight version {answer}, not {version}, which it was sent"
                )
            if self._health[index].state is EngineState.REFITTING:  # it lost no request meanwhile
                self._record_event(index, EngineEvent.CONFIRMED, version)

    async def load_adapters(
        self, folder: str, version: int, oldest: int, only: list[int]
    ) -> dict[str, float]:
        """Let engines serve a PEFT folder as a version, beside all that requests in flight name; seconds by phase.

        No engine pauses. An engine serves the version as soon as it has it; `oldest` is the oldest version that a request may still take.
        An engine lost meanwhile is restarted and asked again, within the restart budget.
        """
        left, started = only, time.perf_counter()
        for _ in range(self.config.engines.restarts + 2):
            clients = {i: self._clients[i] for i in left if i in self._clients}
            calls = (client.weights.load_adapter(folder, version, oldest) for client in clients.values())
            results = await asyncio.gather(*calls, return_exceptions=True)
            for (index, client), result in zip(clients.items(), results, strict=True):
                if isinstance(result, EngineLostError):
                    log.warning("adapters of version %d: %s", version, result)
                    self.mark_suspect(client, result)
                elif isinstance(result, BaseException):
                    raise result
                elif self._health[index].state in (EngineState.SERVING, EngineState.REFITTING):
                    self._record_event(index, EngineEvent.REFIT)
                    self._record_event(index, EngineEvent.CONFIRMED, version)
            left = [index for index in left if not self._health[index].serves(version)]
            if not left:
                return {"load": time.perf_counter() - started}
            await self.ensure(self._model)
        raise EngineError(
            f"engines {left} did not load adapters of version {version} in {self.config.engines.restarts + 2} tries",
            remedy=f"see engine-{left[0]}.log in {self._logs()} for the cause, and start the same command again",
        )

    # GPU memory

    async def sleep(self, only: list[int] | None = None) -> None:
        """Let engines release their GPU memory; running requests are ended. An engine serves again only after its next update.

        The engine itself forgets its version, so that no later driver takes it to hold the weights.
        """
        for index, client in list(self._clients.items()):
            if only is not None and index not in only:
                continue
            health = self._health[index]
            held = [tag for tag in (WEIGHTS, CACHE) if tag not in self._released.get(index, [])]
            if not health.holds_memory or not held:
                continue
            try:
                await idle(client)
                await client.forget_version()
                await self._note_released(index, [WEIGHTS, CACHE])
                await client.weights.release_memory(held)
            except EngineLostError as error:
                log.warning("%s; its memory is needed, so it is ended", error)
                self._lost[index] = str(error)
                with contextlib.suppress(ActorLostError):
                    await self._handles[index].kill()
                await self._drop(index)
                continue
            self._record_event(index, EngineEvent.REFIT)

    async def wake(self) -> bool:
        """Let engines take back all their memory, which must be free; False if no engine had released any."""
        asleep = [client for index, client in self._clients.items() if self._released.get(index)]
        results = await asyncio.gather(
            *(self._take_memory(client, WEIGHTS, CACHE) for client in asleep), return_exceptions=True
        )
        for client, result in zip(asleep, results, strict=True):
            if isinstance(result, EngineLostError):
                log.warning("%s", result)
                self.mark_suspect(client, result)
            elif isinstance(result, BaseException):
                raise result
        return bool(asleep)

    async def _take_memory(self, client: EngineClient, *tags: str) -> None:
        index = next(i for i, held in self._clients.items() if held is client)
        wanted = [tag for tag in self._released.get(index, []) if tag in tags]
        if wanted:
            try:
                await client.weights.resume_memory(wanted)
            except EngineLostError as error:
                raise EngineLostError(f"{error}{_no_room(self.config, CACHE in wanted)}") from None
            await self._note_released(index, [tag for tag in self._released[index] if tag not in wanted])

    async def _note_released(self, index: int, tags: list[str]) -> None:
        self._released[index] = tags
        await self._handles[index].note_released(tags)

    # traces

    async def start_trace(self, steps: int) -> None:
        """Let each engine trace its next steps. An engine that cannot is named in a warning."""

        async def start(index: int, client: EngineClient) -> None:
            await client.start_trace(await self._handles[index].trace_folder(), steps)
            self._traced.add(index)

        self._traced = set()
        await self._of_each("no trace of it", start)

    async def store_trace(self, url: str) -> None:
        """Let each engine that started a trace end it, and store the files. An engine that cannot is named in a warning."""

        async def store(index: int, client: EngineClient) -> None:
            if index not in self._traced:
                return  # it may make a trace for others
            await client.stop_trace()
            await self._handles[index].store_trace(url)

        await self._of_each("its trace is not stored", store)

    async def _of_each(self, otherwise: str, call: Callable[[int, EngineClient], Awaitable[None]]) -> None:
        clients = list(self._clients.items())
        results = await asyncio.gather(
            *(call(index, client) for index, client in clients), return_exceptions=True
        )
        for (index, _), result in zip(clients, results, strict=True):
            if isinstance(result, EngineError | ActorLostError | StorageError):
                log.warning("engine-%d: %s: %s", index, otherwise, result)
            elif isinstance(result, BaseException):
                raise result

    # requests

    def dispatcher(
        self,
        version: int,
        recover: Callable[[int], Awaitable[None]],
        oldest: int | None = None,
        newest: int | None = None,
    ) -> Dispatcher:
        """A dispatcher over the engines that serve `version`, or any version from `oldest` to `newest`."""
        rollout = self.config.rollout
        allowed = range(version if oldest is None else oldest, (version if newest is None else newest) + 1)

        def of(engines: range) -> Callable[[], list[EngineClient]]:
            def find() -> list[EngineClient]:
                return [self._clients[i] for i in engines if any(map(self._health[i].serves, allowed))]

            return until_changed(lambda: self._changes, find)

        settings: dict[str, Any] = {
            "version": version,
            "oldest": oldest,
            "newest": newest,
            "keyed": self.config.pipeline.keeps_cache,
            "attempts": rollout.attempts,
            "progress_timeout_s": rollout.progress_timeout_s,
        }
        e, every = self.config.engines, of(range(self.config.engines.count))
        if self._router:
            return RoutedDispatcher(self._router, every, recover, self.mark_suspect, **settings)
        if e.prefill:
            parts = of(range(e.prefill)), of(range(e.prefill, e.count))
            return PairingDispatcher(*parts, recover, self.mark_suspect, **settings)
        return Dispatcher(every, recover, self.mark_suspect, **settings)

    async def close(self) -> None:
        """Close connections. The processes stay with their actors."""
        clients, self._clients = list(self._clients.values()), {}
        self._health = {index: EngineHealth() for index in self._health}
        self._changes += 1
        await asyncio.gather(*(client.close() for client in clients))
        if self._router:
            await self._router.close()


def _no_room(config: RunConfig, cache: bool) -> str:
    """A hint for when SGLang has ended because too little memory is free. cache: it was to take back its KV cache."""
    ways = []
    if cache:
        share = config.engines.sglang.get("mem_fraction_static", "its default")
        ways.append(f"lower engines.sglang.mem_fraction_static (now {share})")
    if not config.placement.offload_trainer:
        ways.append("set placement.offload_trainer to true")
    return f"; if its log says that the GPU's memory ran out, {' or '.join(ways)}" if ways else ""
