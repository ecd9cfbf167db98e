"""What is waited for says so: in the log, on the page of the run that waits, once it takes its time and not before."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from millrace.core.contracts import progress
from millrace.core.contracts.progress import Count, starting, waiting

log = logging.getLogger("millrace.test_progress")
Wait = Callable[[logging.Logger, str], AbstractContextManager[None]]
run = contextvars.ContextVar("the run that waits", default="none")


class Lines(logging.Handler):
    """Keeps lines with the run that they were logged for; `often` is set when so many tell how long it takes."""

    def __init__(self, often: int = 2) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self.often, self._left = threading.Event(), often

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage().split(", ")[0], run.get()))
        self._left -= "so far" in record.getMessage()
        if not self._left:
            self.often.set()


@contextmanager
def lines() -> Iterator[Lines]:
    handler = Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize(
    ("wait", "text"), [(starting, "engine-0: not there yet"), (waiting, "waiting for engine-0")]
)
def test_a_long_wait_says_so_again_and_again_to_the_run_that_waits(
    wait: Wait, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.001)
    monkeypatch.setattr(progress, "AGAIN_S", 0.001)
    token = run.set("mine")
    try:
        with lines() as found, wait(log, "engine-0"):
            assert found.often.wait(20)
    finally:
        run.reset(token)
    assert found.lines.count((text, "mine")) >= 2
    assert found.lines[-1][0].startswith("engine-0: there after ")


def test_a_short_wait_says_nothing() -> None:
    with lines() as found, waiting(log, "engine-0"):
        pass
    assert not found.lines


@pytest.mark.parametrize(("wait", "said"), [(starting, ["starting engine-0"]), (waiting, [])])
def test_what_fails_is_not_there_and_nothing_is_said_of_it_afterwards(wait: Wait, said: list[str]) -> None:
    before = threading.active_count()
    with lines() as found, pytest.raises(KeyError), wait(log, "engine-0"):
        raise KeyError
    assert [line for line, _ in found.lines] == said
    assert threading.active_count() == before


def test_a_count_is_said_between_beginning_and_end_and_not_too_often() -> None:
    with lines() as found:
        for every_s in (0.0, 3600.0):
            count = Count(log, "answers", 3, every_s)
            for more in (1, 1, 1):
                count.add(more)
    assert [line for line, _ in found.lines] == ["answers: 1 of 3", "answers: 2 of 3"]
