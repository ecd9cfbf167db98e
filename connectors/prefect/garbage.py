"""When the local server's process collects Python's garbage: while no connection to its database is at work.

A statement that a cancelled or failed request left among the garbage is reset by whoever collects it. That waits for the
statement's connection with Python's lock held. Where this connection waits for another one that writes, for up to a minute, that
one cannot commit, since its thread needs Python's lock: the whole server stood still, and with it every run.
"""

from __future__ import annotations

import asyncio
import gc
import time

from prefect.server.database.configurations import ENGINES

from millrace.core.garbage import collect_garbage

EVERY_S = 5.0
LOOK_S = 0.02  # until the next look for a moment at which no connection is at work
LONGEST_S = 120.0  # garbage is collected then all the same


async def collect_between_requests() -> None:
    """Take over from Python's own collector, until cancelled."""
    collect_garbage()
    gc.disable()
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            since = time.monotonic()
            while _is_busy() and time.monotonic() - since < LONGEST_S:  # noqa: ASYNC110 - pools tell nobody
                await asyncio.sleep(LOOK_S)
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()


def _is_busy() -> bool:
    """Whether a connection is in use."""
    return any(engine.pool.checkedout() for engine in ENGINES.values())  # type: ignore[attr-defined]  # a queue pool's
