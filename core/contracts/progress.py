"""Log lines about waiting for a part of a run: it starts, it is ready, it takes long, so many are done."""

import contextvars
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0  # a wait up to this long logs nothing
AGAIN_S = 15.0  # time between repeated lines
COUNT_EVERY_S = 10.0


@contextmanager
def starting(log: logging.Logger, what: str) -> Iterator[None]:
    """Log that `what` starts, every AGAIN_S that it is not ready, and that it is ready when the block ends without an error."""
    log.info("starting %s", what)
    began = time.perf_counter()
    with _said_again(log, f"{what}: not there yet", AGAIN_S):
        yield
    log.info("%s: there after %.1f s", what, time.perf_counter() - began)


@contextmanager
def waiting(log: logging.Logger, what: str) -> Iterator[None]:
    """Log a wait for `what` if the block takes longer than PATIENCE_S, again every AGAIN_S, and how long it took."""
    began = time.perf_counter()
    with _said_again(log, f"waiting for {what}", PATIENCE_S) as said:
        yield
    if said.is_set():
        log.info("%s: there after %.1f s", what, time.perf_counter() - began)


@contextmanager
def _said_again(log: logging.Logger, text: str, first_s: float) -> Iterator[threading.Event]:
    """Log a text after `first_s`, then every AGAIN_S, until the block ends. Yields an event that is set by the first line.

    A thread logs it, since the block may block its own thread. The thread has the block's context, by which a line finds its
    flow run's page.
    """
    began, ended, said = time.perf_counter(), threading.Event(), threading.Event()

    def say() -> None:
        pause = first_s
        while not ended.wait(pause):
            said.set()
            log.info("%s, %.0f s so far", text, time.perf_counter() - began)
            pause = AGAIN_S

    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(say,), name="said again", daemon=True
    )
    thread.start()
    try:
        yield said
    finally:
        ended.set()
        thread.join()


class Count:
    """Logs how many of many are done, every few seconds from the first on."""

    def __init__(self, log: logging.Logger, what: str, whole: int, every_s: float = COUNT_EVERY_S) -> None:
        """what: the things counted; there are `whole` of them."""
        self._log, self._what, self._whole, self._every_s = log, what, whole, every_s
        self._done, self._said_at = 0, 0.0

    def add(self, more: int) -> None:
        """Count `more` as done."""
        now = time.perf_counter()
        self._said_at = self._said_at if self._done else now
        self._done += more
        if self._done < self._whole and now - self._said_at >= self._every_s:
            self._said_at = now
            self._log.info("%s: %d of %d", self._what, self._done, self._whole)
