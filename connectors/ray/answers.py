"""What an actor answers: its result, the error that millrace raised in it, or that it is lost.

Owns which of Ray's errors mean that an actor is gone or out of reach. Knows nothing of what it was asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError, RayTaskError

from millrace.connectors.ray.client import BROKEN, CUT_OFF, awaited, connection, first_line
from millrace.connectors.ray.cluster import joined
from millrace.core.errors import ActorLostError, MillraceError

OTHER_CLUSTER = "from a different cluster"


async def answer(name: str, submit: Callable[[], Awaitable[Any]], made_in: object | None) -> Any:
    """What an actor answers to a call that is submitted here. made_in: the connection that its handle belongs to."""
    if connection() is not made_in:  # the client server that knew the handle is gone
        raise ActorLostError(f"actor {name} is out of reach: {CUT_OFF}")
    try:
        return await _submitted(name, submit)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MillraceError):
            raise cause from None
        raise
    except RayError as error:  # the actor died, or Ray itself did
        raise ActorLostError(f"actor {name} died: {first_line(error)}") from None
    except BROKEN:
        raise ActorLostError(f"actor {name} is out of reach: {CUT_OFF}") from None


def _submitted(name: str, submit: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
    try:
        return awaited(submit())
    except Exception as error:  # noqa: BLE001 - Ray has no type for a handle of a cluster that is gone or was left
        if joined() and OTHER_CLUSTER not in str(error):
            raise
        raise ActorLostError(f"actor {name} died with its cluster") from None
