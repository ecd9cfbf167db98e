"""Says so when a Prefect server does not answer this process: its database may be locked, and every task waits until it is not.

Owns which requests are under way. Knows nothing of what they ask for.
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

LATE_S = 5.0  # under way for so long, a request is said to be waited for
LOOK_S = 1.0
WHAT = "the Prefect server, whose database may be locked by another process"


@functools.cache
def say_when_prefect_is_slow() -> None:
    """From now on. Calling it again changes nothing."""
    requests = Requests()
    patches.send_within(requests.one)
    threading.Thread(target=requests.watch, name="slow-answers", daemon=True).start()


class Requests:
    """Those under way, of any thread."""

    def __init__(self) -> None:
        self._began: dict[object, float] = {}

    @contextmanager
    def one(self) -> Iterator[None]:
        """Within, one more is under way."""
        key = object()
        self._began[key] = time.monotonic()
        try:
            yield
        finally:
            del self._began[key]

    def watch(self) -> None:
        """Look for ever, and log that one is waited for."""
        while True:
            time.sleep(LOOK_S)
            if self._late():
                with waiting(log, WHAT):
                    while self._late():
                        time.sleep(LOOK_S)

    def _late(self) -> bool:
        return any(time.monotonic() - began > LATE_S for began in list(self._began.values()))
