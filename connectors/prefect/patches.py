"""Every assignment into Prefect's objects, each with its version and reason. Called by the local server's process alone."""

from __future__ import annotations

import functools
from datetime import timedelta

from docket import Worker
from prefect.server.api import background_workers

LOOK = timedelta(seconds=3)


def look_for_work_less_often() -> None:
    """Prefect 3.8: the worker of its background services looks for work every 3 s, not four times a second.

    The worker takes both intervals as arguments. Prefect passes none and has no setting for them. Nothing that the worker
    does is waited for.
    """
    background_workers.Worker = functools.partial(  # type: ignore[assignment, attr-defined]
        Worker, minimum_check_interval=LOOK, scheduling_resolution=LOOK
    )
