"""Sends a request to two engines at once: one prefills, the other decodes with the KV cache that SGLang moves between them.

Owns the pairing. The tokens come from the decoding engine; the prefilling engine's answer only confirms its part.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from millrace.connectors.engines.client import (
    EngineClient,
    GenerateRequest,
    Generation,
    Handoff,
    ProgressCheck,
)
from millrace.connectors.engines.dispatcher import Dispatcher, least_loaded
from millrace.core.errors import EngineError, EngineLostError

log = logging.getLogger(__name__)
ROOM_BITS = 63


class PairingDispatcher(Dispatcher):
    """Chooses the prefilling engine as a Dispatcher does, so that a group's prompt is prefilled once, and the least loaded decoding
    engine. When a request is lost both engines become suspect, since either may have failed."""

    def __init__(
        self,
        prefilling: Callable[[], Sequence[EngineClient]],
        decoding: Callable[[], Sequence[EngineClient]],
        recover: Callable[[int], Awaitable[None]],
        mark_suspect: Callable[[EngineClient, EngineLostError], None],
        **settings: Any,
    ) -> None:
        super().__init__(prefilling, recover, mark_suspect, **settings)
        self._decoding = decoding

    @property
    def caching(self) -> list[EngineClient]:
        """Both sides: a prompt waits in the one, and grows in the other."""
        return [*self._engines(), *self._decoding()]

    def _choose(self, session: str | None) -> EngineClient | None:
        return super()._choose(session) if self._decoding() else None

    async def _ask(self, engine: EngineClient, request: GenerateRequest) -> Generation:
        decoder = least_loaded(self._decoding())
        pair = (engine, decoder)
        decode = replace(request, session=None, handoff=_meet(*pair), check=self._check_of(*pair))
        prefill = replace(decode, on_part=None)
        for one in pair:
            one.in_flight += 1  # before the first await, since requests come in bursts
        tasks = [
            asyncio.ensure_future(one.generate(asked))
            for one, asked in zip(pair, (prefill, decode), strict=True)
        ]
        try:
            prefilled, decoded = await asyncio.gather(*tasks)
        except EngineLostError as error:
            self._mark_suspect(decoder, error)
            raise
        finally:
            for one in pair:
                one.in_flight -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if any(version not in self.allowed for _, version in prefilled.weight_versions):
            return prefilled  # the caller refuses its version
        return replace(decoded, cached_tokens=prefilled.cached_tokens)

    def _holders(self, engine: EngineClient) -> Sequence[EngineClient]:
        return [*self._engines(), *self._decoding()]

    def _check_of(self, *pair: EngineClient) -> ProgressCheck:
        """A check that either engine makes progress: one may wait for the other while that has other work."""

        async def check(sent: float, timeout_s: float) -> None:
            found = await asyncio.gather(*(engine.last_moved(sent, timeout_s) for engine in pair))
            if time.monotonic() - max(moved for moved, _ in found) < timeout_s:
                return
            for engine, (_, paused) in zip(pair, found, strict=True):
                if not paused and not await engine.health(timeout_s, generating=True):
                    error = engine.no_progress(timeout_s, paused)
                    log.warning("%s", error)
                    self._mark_suspect(engine, error)
            names = " and ".join(engine.engine_id for engine in pair)
            raise EngineLostError(f"{names}: no token for {timeout_s:g} s (rollout.progress_timeout_s)")

        return check


def _meet(prefill: EngineClient, decode: EngineClient) -> Handoff:
    """The address and number at which the two meet. Raises EngineError if an engine was not started for this."""
    for engine, wanted in ((prefill, "prefill"), (decode, "decode")):
        if engine.part != wanted:
            raise EngineError(
                f"{engine.engine_id} at {engine.url} is to {wanted} (engines.prefill), but runs with "
                f"--disaggregation-mode {engine.part}; start it with {wanted}, or change engines.prefill"
            )
    host = urlsplit(prefill.url).hostname
    assert host is not None
    return Handoff(host, prefill.bootstrap_port, secrets.randbits(ROOM_BITS))
