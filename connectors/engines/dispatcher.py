"""Sends each request to the least loaded engine, keeps groups together, and retries on another engine when one is lost.

Owns the choice of the engine and the number of attempts; JSON passes unchanged. Never returns a token of a weight version that is
not allowed.

A heap of each engine's last known load finds the least loaded one without a look at all of them. A request id names its attempt;
stored ids omit the sender:

    0a1b-0003~00@5f2e9c
    sample    |  sender
              attempt
"""

import asyncio
import contextlib
import heapq
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.connectors.engines.client import AskedExperts, EngineClient, GenerateRequest, Generation
from millrace.connectors.engines.dispatching.pieces import NOTHING, Flush, Parts, joined, shortened
from millrace.core.contracts.images import SentImages
from millrace.core.errors import EngineError, EngineLostError

Engines = list[EngineClient]
Entry = tuple[int, str]  # requests in flight at the time of the entry, then the engine's id


class LeastLoad:
    """Chooses by load, then by id. Notices requests of other senders after at most as many choices as there are engines."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = engines
        self.by_id = {engine.engine_id: engine for engine in engines}
        self._heap: list[Entry] = []
        self._left = 0  # choices until all loads are read again

    def choose(self) -> EngineClient:
        """The engine for the next request, which counts as sent."""
        if not self._left:
            self._heap = [(engine.in_flight, engine.engine_id) for engine in self.engines]
            heapq.heapify(self._heap)
            self._left = len(self.engines)
        self._left -= 1
        while True:
            load, name = self._heap[0]
            engine = self.by_id[name]
            if load == engine.in_flight:
                heapq.heapreplace(self._heap, (load + 1, name))
                return engine
            heapq.heapreplace(self._heap, (engine.in_flight, name))

    def ended(self, engine: EngineClient) -> None:
        """Record that a request of an engine has ended. Ignores an engine that was replaced by another with its name."""
        if self.by_id.get(engine.engine_id) is engine and len(self._heap) < 4 * len(self.engines):
            heapq.heappush(self._heap, (engine.in_flight, engine.engine_id))


def until_changed(changes: Callable[[], int], find: Callable[[], Engines]) -> Callable[[], Engines]:
    """A cached `find`: calls it again only after `changes` has increased, and otherwise returns the same list."""
    kept: tuple[int, Engines] = (-1, [])

    def found() -> Engines:
        nonlocal kept
        if kept[0] != changes():
            kept = changes(), find()
        return kept[1]

    return found


def new_sender() -> str:
    """A unique name for a sender, among all processes."""
    return secrets.token_hex(3)


def request_id(rid: str, attempt: int, sender: str) -> str:
    """Id of one attempt. Its suffix has a fixed width: SGLang aborts by prefix, so no id may be a prefix of another.

    An id must not be used again either, for example when the next iteration continues an answer: SGLang 0.5.17 ends any request
    that has a streamed request's id two seconds after that stream has ended.
    """
    return f"{rid}~{attempt:02}@{sender}"


def without_sender(request: str) -> str:
    """The part of an id that is the same in every run."""
    return request.partition("@")[0]


log = logging.getLogger(__name__)
SESSIONS = 65536
ABORT_EVERY_S = 0.1  # aborts are repeated, since a request may still be on its way to the engine


@dataclass(frozen=True)
class EngineAddress:
    """The URL and the key of an engine."""

    engine_id: str
    url: str
    key: str | None = field(repr=False)


class Dispatcher:
    """Generates on engines that each serve one of the allowed weight versions.

    Weights may change while requests run: a request that an update interrupted is sent again with its tokens so far, and
    continues under the new weights. Each token keeps the version that made it.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[EngineClient]],
        recover: Callable[[int], Awaitable[None]],
        mark_suspect: Callable[[EngineClient, EngineLostError], None],
        *,
        version: int,
        attempts: int,
        progress_timeout_s: float,
        oldest: int | None = None,
        newest: int | None = None,
        keyed: bool = False,
    ) -> None:
        """version: the version to load into engines that serve none of the allowed. oldest, newest: the allowed versions, by default only
        `version`. keyed: requests share prefixes only with requests of the same version, since caches outlive an update.
        """
        self.version = version
        self.allowed = range(
            version if oldest is None else oldest, (version if newest is None else newest) + 1
        )
        self.attempts = attempts
        self.progress_timeout_s = progress_timeout_s
        self.retries = 0
        self._sender = new_sender()
        self._engines = engines
        self._recover = recover
        self._recovering: asyncio.Task[None] | None = None
        self._mark_suspect = mark_suspect
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._failing: set[tuple[str, type]] = set()  # engine and error, until the engine answers again
        self._keyed = keyed
        self._stopped = False
        self._least = LeastLoad(())
        self._in_flight: dict[str, EngineClient] = {}  # by the attempt's request id

    async def generate(
        self,
        input_ids: Sequence[int],
        params: Mapping[str, Any],
        *,
        rid: str,
        session: str | None,
        continued: int = 0,
        priority: int | None = None,
        flush: Flush | None = None,
        experts: AskedExperts | None = None,
        images: SentImages | None = None,
    ) -> Generation:
        """Generate one sample. Raises EngineError after all attempts, naming the last cause.

        flush: stores the tokens meanwhile; stored tokens of an engine that is lost are kept.
        continued: the number of last input ids that are output of an earlier part of the answer; the result continues them.
        experts: asks for experts, from a token on. An answer that an engine retracted is then made again: it would return the experts
        of another pass than the one that sampled its tokens.
        images: pictures of the prompt.
        priority: waiting requests with the smallest number come first. After `stop`, returns the tokens so far as "abort".
        """
        last: EngineError | None = None
        made, sent, tries = NOTHING, 0, 0
        while tries < self.attempts:
            if flush and not flush.take(made):
                await flush.settled()
            engine = None if self._stopped else await self._engine(session)
            if self._stopped:
                return replace(made, finish="abort")
            if engine is None:  # since the recovery another request has lost the engine
                last = EngineError("no engine serves; see the engines' logs")
                tries += 1
                continue
            refit, found = self._refit(engine), len(made.output_ids)
            left = shortened(params, found) if found else params
            ids = [*input_ids, *made.output_ids.tolist()]
            name = request_id(rid, sent, self._sender)
            sent += 1
            parts = Parts(made, flush, self.allowed) if flush else None
            request = GenerateRequest(
                input_ids=ids,
                sampling_params=left,
                rid=name,
                session=session,
                progress_timeout_s=self.progress_timeout_s,
                continued=continued + found,
                priority=priority,
                cache_key=self._cache_key(engine),
                on_part=parts.take if parts else None,
                every=flush.interval if flush else 1,
                experts=_after(experts, made),
                versions=self.allowed,
                images=images,
            )
            try:
                with self._noted(name, engine):
                    result = await self._ask(engine, request)
            except EngineLostError as error:
                last = error
                made = parts.made if parts else made
                self._mark_suspect(engine, error)
            else:
                wrong = [version for _, version in result.weight_versions if version not in self.allowed]
                retracted = experts is not None and result.retractions > 0
                if not wrong and not retracted:
                    made = joined(made, result)
                    if result.finish != "abort":
                        self._failing = {failed for failed in self._failing if failed[0] != engine.engine_id}
                        return made
                    if self._stopped or self._refit(engine) != refit or (parts and parts.halted):
                        continue
                last = EngineError(f"{engine.engine_id}: {self._refusal(wrong, retracted)}")
            tries += 1
            self._note_failure(engine, last, rid, tries)
            if session:
                self._sessions.pop(session, None)
            if not self._stopped:
                await self._recovered()
        raise EngineError(f"{last} (attempt {self.attempts} of rollout.attempts)")

    def addresses(self) -> list[EngineAddress]:
        """The addresses of the engines that serve now."""
        return [EngineAddress(engine.engine_id, engine.url, engine.key) for engine in self._engines()]

    def mark_lost(self, engine_id: str, url: str, error: EngineLostError) -> None:
        """Record that another process lost a request on an engine, unless the engine has been replaced."""
        for engine in self._engines():
            if (engine.engine_id, engine.url) == (engine_id, url):
                self._mark_suspect(engine, error)

    async def stop(self) -> None:
        """End all requests for good: each `generate` returns its tokens so far, as aborted."""
        self._stopped = True
        while self._in_flight:
            sent = [(name, one) for name, engine in self._in_flight.items() for one in self._holders(engine)]
            await asyncio.gather(*(self._abort(name, one) for name, one in sent))
            await asyncio.sleep(ABORT_EVERY_S if self._in_flight else 0)

    @property
    def serving(self) -> list[EngineClient]:
        """The engines that now serve an allowed version."""
        return list(self._engines())

    @property
    def caching(self) -> list[EngineClient]:
        """The engines whose KV caches hold requests."""
        return list(self._engines())

    @property
    def _expected(self) -> str:
        oldest, newest = self.allowed[0], self.allowed[-1]
        return str(newest) if oldest == newest else f"one of {oldest} to {newest}"

    def _refusal(self, wrong: Sequence[int], retracted: bool) -> str:
        """Why an answer is not taken."""
        if wrong:
            return f"answered with weight version {wrong[0]}, {self._expected} is expected"
        if retracted:
            return (
                "its KV cache was full and it computed tokens again, so the experts that it returns are not those of the first "
                "pass; lower rollout.max_concurrency, or give it more memory"
            )
        return "aborted by another process"

    @contextlib.contextmanager
    def _noted(self, name: str, engine: EngineClient) -> Iterator[None]:
        self._in_flight[name] = engine
        try:
            yield
        finally:
            del self._in_flight[name]
            self._least.ended(engine)

    def _holders(self, engine: EngineClient) -> Sequence[EngineClient]:
        """The engines that may hold a request that was sent to `engine`."""
        return [engine]

    def _refit(self, engine: EngineClient) -> int:
        """The `refit` number of the newest weights that may answer a request sent now."""
        return max((one.refit for one in self._holders(engine)), default=engine.refit)

    def _cache_key(self, engine: EngineClient) -> str | None:
        return f"weights:{self._refit(engine)}" if self._keyed else None

    async def _abort(self, name: str, engine: EngineClient) -> None:
        """End a request that was sent to an engine. The request itself notices if the engine is lost."""
        with contextlib.suppress(EngineError):
            await engine.abort(name)

    def _note_failure(self, engine: EngineClient, error: EngineError, rid: str, tries: int) -> None:
        self.retries += 1
        failure = engine.engine_id, type(error)
        # a dying engine loses all its requests at once, and one warning is enough
        repeated = failure in self._failing
        self._failing.add(failure)
        level = logging.DEBUG if repeated else logging.WARNING
        log.log(level, "request %s, attempt %d of %d: %s", rid, tries, self.attempts, error)

    async def _ask(self, engine: EngineClient, request: GenerateRequest) -> Generation:
        return await engine.generate(request)

    async def _engine(self, session: str | None) -> EngineClient | None:
        """An engine that serves. If none does, waits for a recovery first; None if there is still none."""
        engine = self._choose(session)
        if engine is None:
            await self._recovered()
            engine = self._choose(session)
        return engine

    async def _recovered(self) -> None:
        """Wait for a recovery, which all requests that need one share."""
        if self._recovering is None or self._recovering.done():
            self._recovering = asyncio.ensure_future(self._recover(self.version))
        await asyncio.shield(self._recovering)

    def _choose(self, session: str | None) -> EngineClient | None:
        engines = self._engines()
        if not engines:
            return None
        if self._least.engines is not engines:
            self._least = LeastLoad(engines)
        held = self._least.by_id.get(self._sessions.get(session, "")) if session else None
        if held is not None:
            return held
        chosen = self._least.choose()
        if session:
            self._sessions[session] = chosen.engine_id
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return chosen


def _after(asked: AskedExperts | None, made: Generation) -> AskedExperts | None:
    """Asks for the experts of the tokens for which an answer so far has none."""
    if asked is None or made.routed is None:
        return asked
    return replace(asked, first=asked.first + made.routed.count)


def least_loaded(engines: Iterable[EngineClient]) -> EngineClient:
    """The engine with the fewest requests in flight."""
    return min(engines, key=lambda engine: (engine.in_flight, engine.engine_id))
