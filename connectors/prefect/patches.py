"""Every assignment into Prefect's objects, each with its version and reason; and a log line for requests that the server leaves open.

Prefect's database may be locked, and every task waits then. Owns the list of pending requests. Knows nothing of what they ask
for.
"""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

from millrace.core.contracts.progress import waiting

LOOK = timedelta(seconds=3)
HEARTBEAT = timedelta(seconds=60)


def look_for_work_less_often() -> None:
    """Prefect 3.8: the worker of its background services polls for work every 3 s, not four times a second.

    The worker takes both intervals as arguments, but Prefect passes none and has no setting for them. Nothing waits for the
    worker's work. Only the local server's process calls this.
    """
    from docket import Worker
    from prefect.server.api import background_workers

    background_workers.Worker = functools.partial(  # type: ignore[assignment, attr-defined]
        Worker, minimum_check_interval=LOOK, scheduling_resolution=LOOK
    )


def send_heartbeats_less_often() -> None:
    """Prefect 3.8: the worker of its background services sends a heartbeat every 60 s, not every 2 s.

    The docket takes the interval as an argument, but Prefect passes none and has no setting for it. Nobody asks for the list
    of workers. Only the local server's process calls this.
    """
    from docket import Docket
    from prefect.server.api import server

    server.Docket = functools.partial(Docket, heartbeat_interval=HEARTBEAT)  # type: ignore[assignment, attr-defined]


def look_for_cancellations_less_often() -> None:
    """burner-redis 0.1: a wait for a published message looks for it every 3 s, not ten times a second in a thread.

    The worker of Prefect's background services waits like that for cancellations of its tasks, which Prefect 3.8 never sends.
    It has no setting for it. Only the local server's process calls this.
    """
    from burner_redis import PubSub

    get_message = PubSub.get_message

    async def look(
        messages: PubSub, ignore_subscribe_messages: bool = False, timeout: float | None = 0.0
    ) -> dict[str, Any] | None:
        """As get_message, but with a timeout it may return up to `LOOK` after the call."""
        while True:
            message: dict[str, Any] | None = await get_message(
                messages, ignore_subscribe_messages, timeout=0.0
            )
            if message is not None or timeout == 0.0:
                return message
            await asyncio.sleep(LOOK.total_seconds())
            timeout = None if timeout is None else 0.0

    PubSub.get_message = look


def send_within(under_way: Callable[[], AbstractContextManager[None]]) -> None:
    """Prefect 3.8: wrap each request of this process to a Prefect server, retries included, in such a context.

    Prefect has no hook that would notice a missing answer.
    """
    from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient

    send, send_sync = PrefectHttpxAsyncClient.send, PrefectHttpxSyncClient.send

    async def watched(client: Any, *args: Any, **kwargs: Any) -> Any:
        with under_way():
            return await send(client, *args, **kwargs)

    def watched_sync(client: Any, *args: Any, **kwargs: Any) -> Any:
        with under_way():
            return send_sync(client, *args, **kwargs)

    PrefectHttpxAsyncClient.send = watched  # type: ignore[method-assign, assignment]
    PrefectHttpxSyncClient.send = watched_sync  # type: ignore[method-assign, assignment]


log = logging.getLogger(__name__)

LATE_S = 5.0  # a request that is pending for longer is reported
LOOK_S = 1.0
WHAT = "the Prefect server, whose database may be locked by another process"


@functools.cache
def say_when_prefect_is_slow() -> None:
    """Start to report slow answers. Further calls change nothing."""
    requests = Requests()
    send_within(requests.one)
    threading.Thread(target=requests.watch, name="slow-answers", daemon=True).start()


class Requests:
    """The pending requests of all threads."""

    def __init__(self) -> None:
        self._began: dict[object, float] = {}

    @contextmanager
    def one(self) -> Iterator[None]:
        """A context that counts one more pending request."""
        key = object()
        self._began[key] = time.monotonic()
        try:
            yield
        finally:
            del self._began[key]

    def watch(self) -> None:
        """Run for ever, and log requests that are pending for too long."""
        while True:
            time.sleep(LOOK_S)
            if self._late():
                with waiting(log, WHAT):
                    while self._late():
                        time.sleep(LOOK_S)

    def _late(self) -> bool:
        return any(time.monotonic() - began > LATE_S for began in list(self._began.values()))
