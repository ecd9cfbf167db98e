"""Every assignment into Prefect's objects, each with its version and reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

LOOK = timedelta(seconds=3)


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
