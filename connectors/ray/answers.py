"""Awaits an actor's answer: its result, millrace's error from inside it, or ActorLostError.

Owns which of Ray's errors mean that an actor is gone or out of reach, and that no call waits for a cluster that is gone. Knows
nothing of what calls do.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError, RayTaskError

from millrace.connectors.ray.client import BROKEN, CUT_OFF, awaited, connection, first_line
from millrace.connectors.ray.cluster import gcs_address, head_died, joined
from millrace.core.errors import ActorLostError, MillraceError

OTHER_CLUSTER = "from a different cluster"
LOOK_S = 2.0  # seconds between checks that the cluster is there


async def answer(name: str, submit: Callable[[], Awaitable[Any]], made_in: object | None) -> Any:
    """Submit a call to an actor and await its answer. made_in: the connection that its handle belongs to."""
    if connection() is not made_in:  # the handle belongs to a client server that is gone
        raise ActorLostError(f"actor {name} is out of reach: {CUT_OFF}")
    try:
        return await in_cluster(f"actor {name}", _submitted(name, submit))
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MillraceError):
            raise cause from None
        raise
    except RayError as error:  # the actor or Ray itself died
        raise ActorLostError(f"actor {name} died: {first_line(error)}") from None
    except BROKEN:
        raise ActorLostError(f"actor {name} is out of reach: {CUT_OFF}") from None


async def in_cluster(who: str, asked: Awaitable[Any]) -> Any:
    """Await an answer of Ray. Raises ActorLostError if the local head dies meanwhile, or this process leaves its cluster.

    If the head dies while an actor starts, Ray itself reports nothing, and ends this process after a minute.
    """
    home, pending = connection() or gcs_address(), asyncio.ensure_future(asked)
    try:
        while not (await asyncio.wait([pending], timeout=LOOK_S))[0]:
            if home is None or home != (connection() or gcs_address()) or head_died():
                raise ActorLostError(f"{who} died with its cluster")
        return pending.result()
    finally:
        pending.cancel()


def _submitted(name: str, submit: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
    try:
        return awaited(submit())
    except Exception as error:  # noqa: BLE001 - Ray has no error type for a handle of a former cluster
        if joined() and OTHER_CLUSTER not in str(error):
            raise
        raise ActorLostError(f"actor {name} died with its cluster") from None
