"""What every client keeps of its engine: requests under way, weight updates, and when the engine last made progress.

Owns how a request is watched while it runs without a time limit. Knows no protocol: a client says how it asks for one answer and for
progress.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from millrace.connectors.engines.client import GenerateRequest, Generation, ProgressCheck
from millrace.core.errors import EngineLostError, EngineStalledError
from millrace.core.waits import beat

POLLS = 4  # per progress_timeout_s, so a stall is noticed at most a quarter of it late
# Starts at random, since engines and their caches outlive a driver: two processes must not use the same numbers.
_refits = itertools.count(secrets.randbits(48))


class WatchedEngine:
    """The part of an EngineClient that is the same for all kinds of engine."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.in_flight = 0
        self.refit = next(_refits)
        self.refits_amid_requests = 0
        self.part = "null"
        self.bootstrap_port = 0
        self._answered = 0
        self._polling = asyncio.Lock()
        self._last_progress: Any = None  # in the last answered poll
        self._poll_error: EngineLostError | None = None  # why the last poll got no answer
        self._polled_at = 0.0
        self._answered_at = self._moved_at = time.monotonic()
        self._was_paused = False  # in the last answered poll

    async def progress(self, timeout_s: float) -> tuple[Any, bool]:
        """A value that changes whenever the engine generates, and whether the engine is paused."""
        raise NotImplementedError

    async def _ask(self, request: GenerateRequest) -> Generation:
        """Ask for one answer. Cancelling ends the request at the engine."""
        raise NotImplementedError

    async def generate(self, request: GenerateRequest) -> Generation:
        self.in_flight += 1
        try:
            check = request.check or self._check_progress
            return await _watched(self._ask(request), check, request.progress_timeout_s)
        finally:
            self.in_flight -= 1

    def note_refit(self) -> None:
        self.refit = next(_refits)

    def _note_answer(self) -> None:
        """Record that the engine answered a request, which is progress."""
        self._answered += 1
        beat()

    async def _check_progress(self, sent: float, timeout_s: float) -> None:
        """Raise an error if the engine makes no progress. An engine that stays paused is given up too, but not as stalled."""
        moved, paused = await self.last_moved(sent, timeout_s)
        if time.monotonic() - moved >= timeout_s:
            raise self.no_progress(timeout_s, paused)

    async def last_moved(self, since: float, timeout_s: float) -> tuple[float, bool]:
        """One poll serves all requests that ask at about the same time. A poll may fail because the engine is busy, for example with
        compiling, so this raises EngineLostError only if all polls have failed for timeout_s.
        """
        async with self._polling:
            if time.monotonic() - self._polled_at >= timeout_s / POLLS / 2:
                await self._poll(timeout_s)
        if self._poll_error and time.monotonic() - max(since, self._answered_at) >= timeout_s:
            raise EngineLostError(str(self._poll_error))
        return max(since, self._moved_at), self._was_paused

    async def _poll(self, timeout_s: float) -> None:
        try:
            tokens, self._was_paused = await self.progress(timeout_s)
        except EngineLostError as error:
            self._poll_error = error
        else:
            self._poll_error, self._answered_at = None, time.monotonic()
            now = (self._answered, tokens)
            if now != self._last_progress:
                self._last_progress, self._moved_at = now, self._answered_at
                beat()
        self._polled_at = time.monotonic()

    def no_progress(self, timeout_s: float, paused: bool) -> EngineLostError:
        message = f"{self.engine_id}: no token for {timeout_s:g} s (rollout.progress_timeout_s)"
        return EngineLostError(f"{message}: paused") if paused else EngineStalledError(message)


async def _watched(
    asking: Coroutine[Any, Any, Generation], check: ProgressCheck, progress_timeout_s: float
) -> Generation:
    """Await the answer without a time limit, as long as `check` finds that the engine generates tokens."""
    running = asyncio.ensure_future(asking)
    sent = time.monotonic()
    try:
        while True:
            done, _ = await asyncio.wait({running}, timeout=progress_timeout_s / POLLS)
            if done:
                return running.result()
            await check(sent, progress_timeout_s)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
