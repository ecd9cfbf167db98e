"""How a part of a run that is waited for says so in the log of whoever waits: it starts, it is there, it takes its time, so many are done."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0  # of a wait that says nothing
AGAIN_S = 15.0  # until it is said again
COUNT_EVERY_S = 10.0


@contextmanager
def starting(log: logging.Logger, what: str) -> Iterator[None]:
    """Log that `what` starts, every AGAIN_S that it is not there, and that it is there once the block ends without an error."""
    log.info("starting %s", what)
    began = time.perf_counter()
    with _said_again(log, f"{what}: not there yet", AGAIN_S):
        yield
    log.info("%s: there after %.1f s", what, time.perf_counter() - began)


@contextmanager
def waiting(log: logging.Logger, what: str) -> Iterator[None]:
    """Log that `what` is waited for if the block takes longer than PATIENCE_S, again every AGAIN_S, and how long it took."""
    began = time.perf_counter()
    with _said_again(log, f"waiting for {what}", PATIENCE_S) as said:
        yield
    if said.is_set():
        log.info("%s: there after %.1f s", what, time.perf_counter() - began)


@contextmanager
def _said_again(log: logging.Logger, text: str, first_s: float) -> Iterator[threading.Event]:
    """Log a text after `first_s` and then every AGAIN_S until the block ends. Yields what is set once it was logged.

    A thread says it: the block may hold up its own one. It has the block's context, by which a line finds its flow run's page.
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
    """Says how many of many are done, every few seconds from the first on."""

    def __init__(self, log: logging.Logger, what: str, whole: int, every_s: float = COUNT_EVERY_S) -> None:
        """what: of which there are `whole`."""
        self._log, self._what, self._whole, self._every_s = log, what, whole, every_s
        self._done, self._said_at = 0, 0.0

    def add(self, more: int) -> None:
        """Count what was done now."""
        now = time.perf_counter()
        self._said_at = self._said_at if self._done else now
        self._done += more
        if self._done < self._whole and now - self._said_at >= self._every_s:
            self._said_at = now
            self._log.info("%s: %d of %d", self._what, self._done, self._whole)
