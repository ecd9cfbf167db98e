"""What an actor answers: its result, the error that millrace raised in it, or that it is lost.

Owns which of Ray's errors mean that an actor is gone or out of reach, and that nobody waits for a cluster that is gone. Knows
nothing of what it was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError, RayTaskError

from millrace.connectors.ray.client import BROKEN, CUT_OFF, awaited, connection, first_line
from millrace.connectors.ray.cluster import gcs_address, head_died, joined
from millrace.core.errors import ActorLostError, MillraceError

OTHER_CLUSTER = "from a different cluster"
LOOK_S = 2.0  # from one look for the cluster to the next


async def answer(name: str, submit: Callable[[], Awaitable[Any]], made_in: object | None) -> Any:
    """What an actor answers to a call that is submitted here. made_in: the connection that its handle belongs to."""
    if connection() is not made_in:  # the client server that knew the handle is gone
        raise ActorLostError(f"actor {name} is out of reach: {CUT_OFF}")
    try:
        return await in_cluster(f"actor {name}", _submitted(name, submit))
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MillraceError):
            raise cause from None
        raise
    except RayError as error:  # the actor died, or Ray itself did
        raise ActorLostError(f"actor {name} died: {first_line(error)}") from None
    except BROKEN:
        raise ActorLostError(f"actor {name} is out of reach: {CUT_OFF}") from None


async def in_cluster(who: str, asked: Awaitable[Any]) -> Any:
    """What was asked of Ray. Raises ActorLostError where the local head dies meanwhile, or this process leaves its cluster.

    Of an actor that is still starting when the head dies Ray would say nothing, and end this process after a minute.
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
    except Exception as error:  # noqa: BLE001 - Ray has no type for a handle of a cluster that is gone or was left
        if joined() and OTHER_CLUSTER not in str(error):
            raise
        raise ActorLostError(f"actor {name} died with its cluster") from None
