"""The connection of a driver that stands outside the cluster: it joins by Ray's client server, `ray://host:port`.

Owns which errors mean that it broke, and the message for them. A process on a node has no such connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import Any, cast

from grpc import RpcError

from millrace.core.config.placement import is_clients
from millrace.core.errors import ActorLostError

BROKEN = (ConnectionError, RpcError)  # what Ray's client raises once its server is gone
CUT_OFF = "the connection to Ray's client server broke"


def connection() -> object | None:
    """This process's connection, which handles on actors belong to. None on a node, and once it is found to be broken."""
    from ray.util.client import ray as api

    found: object | None = api.get_context().client_worker
    return found


def namespace() -> str | None:
    """The namespace that this process has joined; None where its connection is broken."""
    import ray

    try:
        return str(ray.get_runtime_context().namespace)
    except BROKEN:
        return None


def awaited(reference: Any) -> Awaitable[Any]:
    """What is to be awaited of a reference. Ray's client logs a stack where a result comes to a future that was cancelled."""
    if connection() is None:
        return cast(Awaitable[Any], reference)
    result = asyncio.wrap_future(reference.future())
    result.add_done_callback(_seen)
    return asyncio.shield(result)


def _seen(result: asyncio.Future[Any]) -> None:
    """asyncio reports errors that nobody asked for."""
    if not result.cancelled():
        result.exception()


def drop() -> None:
    """Forget a connection that broke by itself: Ray refuses to make another one before."""
    if connection() is not None:
        _disconnect()


def _disconnect() -> None:
    from ray.util.client import ray as api

    api.disconnect()


@contextlib.contextmanager
def joining(address: str) -> Iterator[None]:
    """Within, this process joins a cluster. Raises ActorLostError with a remedy where no client server answers, or it cannot begin."""
    try:
        yield
    except BROKEN as error:
        if not is_clients(address):
            raise
        _disconnect()  # else Ray takes this process for a client also where it joins as a node
        where = f"placement.ray_address = {address}"
        if isinstance(error, ConnectionAbortedError):  # it answered, with what it raised
            raise ActorLostError(
                f"Ray's client server cannot begin a connection: {str(error).strip().splitlines()[-1]}",
                where=where,
                remedy="correct what its logs on the head name (ray_client_server*), and start the same command again",
            ) from None
        raise ActorLostError(
            f"Ray's client server cannot be joined: {first_line(error)}",
            where=where,
            remedy="start it with `ray start --head --ray-client-server-port=PORT`, and start the same command again",
        ) from None


def first_line(error: Exception) -> str:
    """What an error of Ray's says first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
