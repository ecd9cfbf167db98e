"""Whether two mathematical expressions are the same, by math-verify, within bounds of size and time.

Owns the calls of the library and their time limit; `bounded` refuses expressions that are too large first. Two answers that
are too large, or that take longer than the limit, are not found equal. The answer does not depend on the order of the two.

It differs from math-verify alone, as a careful human would:

- decimals are exact: 0.333333 is not 1/3, and 3.14159 is not pi; the library rounds to six places;
- (1,2) is a pair or an interval, never the list 1,2; the library takes a list for a pair;
- a chain must be true: 6=5 has no value, 2+3=5 is 5, x=5 is 5; the library takes what stands last;
- an inequality is its interval on either side; the library allows it for the label only;
- of several boxes with text between them the last one counts (`math.boxed_answer`);
- 2(3) is 6; the library reads a mixed number and adds;
- letters after a number are variables: 2t is not 2; the library drops them as units (`answer_text` knows units).
"""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from millrace.core.rewards.answer_text import is_apart
from millrace.core.rewards.bounded import TooLarge, check_size

# five times the time of a comparison that ends; CPU time, in the main thread only
SECONDS = 0.5


def same_expression(a: str, b: str) -> bool:
    """Whether two spellings (see `answer_text.spelling`) are the same expression; False if that is not decided."""
    if is_apart(a) or is_apart(b):
        return False
    try:
        check_size(a)
        check_size(b)
    except TooLarge:
        return False
    # loads sympy, which takes seconds, only if answers are compared
    from millrace.core.rewards import expressions

    try:
        with _limit(SECONDS):
            return expressions.same(*sorted((a, b)))
    except _OutOfTime:
        return False


def simplest(text: str) -> str | None:
    """The library's text for a spelling, the same for expressions that differ only in order; None if it finds none in time."""
    if is_apart(text):
        return None
    try:
        check_size(text)
    except TooLarge:
        return None
    from millrace.core.rewards import expressions

    try:
        with _limit(SECONDS / 4):
            return expressions.form(text)
    except _OutOfTime:
        return None


class _OutOfTime(BaseException):
    """Not an Exception: the library would catch it and continue."""


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime within the block after so much CPU time of the main thread.

    Signals reach that thread only: in any
    other there is no limit, and `reward.timeout_s` ends a comparison. Garbage is not collected meanwhile: in a large process a
    collection takes longer than a comparison, and would decide the verdict.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running, started = True, time.thread_time()

    def stop(number: int, frame: FrameType | None) -> None:
        # the timer also counts the time of other threads of the process
        if running and time.thread_time() - started >= seconds:
            raise _OutOfTime

    before, collects = signal.signal(signal.SIGVTALRM, stop), gc.isenabled()
    gc.disable()
    signal.setitimer(
        signal.ITIMER_VIRTUAL, seconds, seconds / 10
    )  # repeats, in case a destructor swallows the first
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if collects:
            gc.enable()
