"""Logs when a Prefect server does not answer this process: its database may be locked, and every task waits.

Owns the list of pending requests. Knows nothing of what they ask for.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.connectors.prefect import patches
from millrace.core.contracts.progress import waiting

log = logging.getLogger(__name__)

LATE_S = 5.0  # a request that is pending for longer is reported
LOOK_S = 1.0
WHAT = "the Prefect server, whose database may be locked by another process"


@functools.cache
def say_when_prefect_is_slow() -> None:
    """Start to report slow answers. Further calls change nothing."""
    requests = Requests()
    patches.send_within(requests.one)
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
