"""Every assignment into Prefect's objects, each with its version and reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

LOOK = timedelta(seconds=3)


def look_for_work_less_often() -> None:
    """Prefect 3.8: the worker of its background services looks for work every 3 s, not four times a second.

    The worker takes both intervals as arguments. Prefect passes none and has no setting for them. Nothing that the worker
    does is waited for. Called by the local server's process alone.
    """
    from docket import Worker
    from prefect.server.api import background_workers

    background_workers.Worker = functools.partial(  # type: ignore[assignment, attr-defined]
        Worker, minimum_check_interval=LOOK, scheduling_resolution=LOOK
    )


def send_within(under_way: Callable[[], AbstractContextManager[None]]) -> None:
    """Prefect 3.8: each request of this process to a Prefect server, with its retries, is made within a context of this kind.

    Prefect has no hook that sees an answer which does not come.
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
