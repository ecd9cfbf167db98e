"""The connection of a driver outside the cluster, which joins through Ray's client server, `ray://host:port`.

Owns which errors mean that the connection broke, and their message. A process on a node has no such connection.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import Any, cast

from grpc import RpcError

from millrace.core.config.placement import is_clients
from millrace.core.errors import ActorLostError

BROKEN = (ConnectionError, RpcError)  # raised by Ray's client if its server is gone
CUT_OFF = "the connection to Ray's client server broke"


def connection() -> object | None:
    """This process's connection, to which handles of actors belong. None on a node, and once it is known to be broken."""
    from ray.util.client import ray as api

    found: object | None = api.get_context().client_worker
    return found


def namespace() -> str | None:
    """The namespace that this process has joined; None if its connection is broken."""
    import ray

    try:
        return str(ray.get_runtime_context().namespace)
    except BROKEN:
        return None


def awaited(reference: Any) -> Awaitable[Any]:
    """An awaitable for a reference. Shields the client's future: Ray's client logs a stack if a cancelled one gets a result."""
    if connection() is None:
        return cast(Awaitable[Any], reference)
    result = asyncio.wrap_future(reference.future())
    result.add_done_callback(_seen)
    return asyncio.shield(result)


def _seen(result: asyncio.Future[Any]) -> None:
    """Retrieve the exception, since asyncio reports exceptions that nobody retrieved."""
    if not result.cancelled():
        result.exception()


def drop() -> None:
    """Close a broken connection, without which Ray refuses to open another."""
    if connection() is not None:
        _disconnect()


def _disconnect() -> None:
    from ray.util.client import ray as api

    api.disconnect()


@contextlib.contextmanager
def joining(address: str) -> Iterator[None]:
    """For joining a cluster: raise ActorLostError with a remedy if no client server answers, or it cannot open a connection."""
    try:
        yield
    except BROKEN as error:
        if not is_clients(address):
            raise
        # without this Ray takes the process for a client even when it later joins as a node
        _disconnect()
        where = f"placement.ray_address = {address}"
        if isinstance(error, ConnectionAbortedError):  # the server answered with its own error
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
    """The first line of an error of Ray's."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
