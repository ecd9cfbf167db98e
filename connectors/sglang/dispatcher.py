"""Sends each request to the least loaded engine, keeps groups together, and tries elsewhere when one is lost.

Owns that choice and the count of tries; JSON passes untouched. A sample of another weight version than expected is
never returned.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from millrace.connectors.sglang.client import EngineClient, Generation
from millrace.core.errors import EngineError, EngineLostError

log = logging.getLogger(__name__)
SESSIONS = 65536


def request_id(rid: str, attempt: int) -> str:
    """Request id of one attempt. Fixed-width suffix: SGLang aborts by prefix, so no id may be a prefix of another."""
    return f"{rid}~{attempt:02}"


class Dispatcher:
    """Generates on engines that all serve one weight version."""

    def __init__(
        self,
        engines: Callable[[], Sequence[EngineClient]],
        recover: Callable[[int], Awaitable[None]],
        mark_suspect: Callable[[EngineClient, EngineLostError], None],
        *,
        version: int,
        attempts: int,
        progress_timeout_s: float,
    ) -> None:
        self.version = version
        self.attempts = attempts
        self.progress_timeout_s = progress_timeout_s
        self.retries = 0
        self._engines = engines
        self._recover = recover
        self._mark_suspect = mark_suspect
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._failing: set[tuple[str, type]] = set()  # engines that answered nothing since they so failed

    async def generate(
        self, input_ids: Sequence[int], params: Mapping[str, Any], *, rid: str, session: str | None
    ) -> Generation:
        """Generate one sample. Raises EngineError after all attempts, naming the last cause."""
        last: EngineError | None = None
        for attempt in range(self.attempts):
            engine = await self._engine(session)
            if engine is None:  # another request's loss took it since the recovery
                last = EngineError("no engine serves; see the engines' logs")
                continue
            try:
                result = await self._ask(engine, input_ids, params, request_id(rid, attempt), session)
            except EngineLostError as error:
                last = error
                self._mark_suspect(engine, error)
            else:
                wrong = [version for _, version in result.weight_versions if version != self.version]
                if not wrong and result.finish != "abort":
                    self._failing = {failed for failed in self._failing if failed[0] != engine.engine_id}
                    return result
                last = EngineError(
                    f"{engine.engine_id}: aborted by another process"
                    if not wrong
                    else f"{engine.engine_id}: answered with weight version {wrong[0]}, {self.version} is expected"
                )
            self.retries += 1
            failure = engine.engine_id, type(last)
            repeated = failure in self._failing  # an engine that dies loses all its requests at once
            self._failing.add(failure)
            level = logging.DEBUG if repeated else logging.WARNING
            log.log(level, "request %s, attempt %d of %d: %s", rid, attempt + 1, self.attempts, last)
            if session:
                self._sessions.pop(session, None)
            await self._recover(self.version)
        raise EngineError(f"{last} (attempt {self.attempts} of rollout.attempts)")

    async def _ask(
        self,
        engine: EngineClient,
        input_ids: Sequence[int],
        params: Mapping[str, Any],
        rid: str,
        session: str | None,
    ) -> Generation:
        return await engine.generate(
            input_ids, params, rid=rid, session=session, progress_timeout_s=self.progress_timeout_s
        )

    async def _engine(self, session: str | None) -> EngineClient | None:
        """One that serves; if another request's loss has left none, once they are rebuilt. None if that left none either."""
        engine = self._choose(session)
        if engine is None:
            await self._recover(self.version)
            engine = self._choose(session)
        return engine

    def _choose(self, session: str | None) -> EngineClient | None:
        engines = {engine.engine_id: engine for engine in self._engines()}
        if not engines:
            return None
        held = self._sessions.get(session) if session else None
        if held in engines:
            return engines[held]
        chosen = least_loaded(engines.values())
        if session:
            self._sessions[session] = chosen.engine_id
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return chosen


def least_loaded(engines: Iterable[EngineClient]) -> EngineClient:
    """The one with the fewest requests in flight."""
    return min(engines, key=lambda engine: (engine.in_flight, engine.engine_id))
