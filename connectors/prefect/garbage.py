"""When the local server's process collects Python's garbage: while no connection to its database is at work.

A statement that a cancelled or failed request left among the garbage is reset by whoever collects it. That waits for the
statement's connection with Python's lock held. Where this connection waits for another one that writes, for up to a minute, that
one cannot commit, since its thread needs Python's lock: the whole server stood still, and with it every run.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable

from prefect.server.database.configurations import ENGINES

from millrace.core.garbage import collect_garbage, give_back_memory

EVERY_S = 5.0
GIVE_BACK_EVERY = 12  # looks: then all is collected, and the host gets what is free
MANY = 2000  # new objects, from which on a look collects
LOOK_S = 0.02  # until the next look for a moment at which no connection is at work
LONGEST_S = 120.0  # garbage is collected then all the same


async def collect_between_requests(started: Callable[[], bool]) -> None:
    """Take over from Python's own collector, until cancelled. started: whether the server has loaded what it needs."""
    gc.disable()
    try:
        while not started():  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(LOOK_S)
        await _between_requests()
        # 200,000 objects that live as long as the process took 0.2 s of each later collection: 4 % of an idle core
        collect_garbage()
        for look in itertools.count(1):
            await asyncio.sleep(EVERY_S)
            await _between_requests()
            if look % GIVE_BACK_EVERY == 0:
                give_back_memory()
            elif gc.get_count()[0] >= MANY:  # an idle server makes some 200 until the next look
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()


async def _between_requests() -> None:
    """Wait until no connection is in use, `LONGEST_S` at most."""
    since = time.monotonic()
    while _is_busy() and time.monotonic() - since < LONGEST_S:  # noqa: ASYNC110 - pools tell nobody
        await asyncio.sleep(LOOK_S)


def _is_busy() -> bool:
    """Whether a connection is in use."""
    return any(engine.pool.checkedout() for engine in ENGINES.values())  # type: ignore[attr-defined]  # a queue pool's
