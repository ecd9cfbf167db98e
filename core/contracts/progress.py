"""How a part of a run that starts says so: in two lines of its starter's log, the second with the seconds that it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting(log: logging.Logger, what: str) -> Iterator[None]:
    """Log that `what` starts, and that it is there once the block ends without an error."""
    log.info("starting %s", what)
    began = time.perf_counter()
    yield
    log.info("%s: there after %.1f s", what, time.perf_counter() - began)
