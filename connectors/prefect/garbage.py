"""Collects Python's garbage in the local server's process only while no database connection is in use.

Cancelled and failed requests leave SQLite statements among the garbage, and collecting a statement resets it. The reset waits for
the statement's connection while it holds Python's GIL. If that connection waits for a writing connection, for up to a minute, the
writer cannot commit, since its thread needs the GIL: the whole server stood still, and every run with it.
"""

import asyncio
import gc
import itertools
import time
from collections.abc import Callable

from prefect.server.database.configurations import ENGINES

from millrace.connectors.host.garbage import collect_garbage, give_back_memory

EVERY_S = 5.0
GIVE_BACK_EVERY = 12  # rounds between full collections, which also return free memory to the host
MANY = 2000  # new objects; with fewer a round does not collect
LOOK_S = 0.02  # seconds between checks for a moment without connections in use
LONGEST_S = 120.0  # after this wait garbage is collected even if connections are in use


async def collect_between_requests(started: Callable[[], bool]) -> None:
    """Replace Python's automatic collection until cancelled. started: returns whether the server has loaded its modules."""
    gc.disable()
    try:
        while not started():  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(LOOK_S)
        await _between_requests()
        # freezes the 200,000 objects that live as long as the process: they cost each later collection 0.2 s, 4 % of an idle core
        collect_garbage()
        for look in itertools.count(1):
            await asyncio.sleep(EVERY_S)
            await _between_requests()
            if look % GIVE_BACK_EVERY == 0:
                give_back_memory()
            elif gc.get_count()[0] >= MANY:  # an idle server creates some 200 per round
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()


async def _between_requests() -> None:
    """Wait until no connection is in use, at most `LONGEST_S`."""
    since = time.monotonic()
    while _is_busy() and time.monotonic() - since < LONGEST_S:  # noqa: ASYNC110 - pools have no event for it
        await asyncio.sleep(LOOK_S)


def _is_busy() -> bool:
    """Whether a connection is in use."""
    return any(engine.pool.checkedout() for engine in ENGINES.values())  # type: ignore[attr-defined]  # a queue pool's
