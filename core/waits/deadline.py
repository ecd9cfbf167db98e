"""A wait that ends once nothing has moved for a limit: however long it takes, as long as something does.

    ranks = await progressing(asyncio.gather(*calls), "train on 8 ranks", limit, progress)

Where nothing moves in POLLS looks in a row it raises StalledError. Looks are counted, not seconds: a host that slept, or a
process that was stopped and continued, is no stall. What is waited for is cancelled; ending what hangs is the caller's part.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.core.errors import StalledError
from millrace.core.waits.heartbeat import beat, beats

T = TypeVar("T")
POLLS = 4  # per limit: a stall is noticed at most a quarter of it late
CANCEL_S = 5.0  # for what is cancelled to leave

Progress = Callable[[], Awaitable[object]]
"""A reading that changes whenever something gets done."""


@dataclass(frozen=True)
class Limit:
    """How long nothing may move."""

    seconds: float
    setting: str = "run.progress_timeout_s"  # the field that changes it

    @property
    def pause_s(self) -> float:
        """Between two looks."""
        return self.seconds / POLLS

    def verdict(self, what: str, seen: str = "") -> StalledError:
        """The error of a wait for `what`. seen: what is known of those that stand still."""
        return StalledError(
            f"nothing moved for {self.seconds:g} s ({self.setting}){f': {seen}' if seen else ''}",
            where=what,
            remedy=f"raise {self.setting} if it was at work all the time; else correct what held it up, and start the same "
            "command again: what finished is kept",
        )


USUAL = Limit(1800.0)  # the setting's default


class Watch:
    """Compares readings that are taken a limit's pause apart."""

    def __init__(self) -> None:
        self._last: object = self  # equal to no reading
        self._equal = 0

    def moved(self, reading: object) -> bool:
        """Take a reading; whether it differs from the one before. The first one does."""
        if reading == self._last:
            self._equal += 1
            return False
        self._last, self._equal = reading, 0
        return True

    @property
    def stalled(self) -> bool:
        """Whether nothing moved for the limit."""
        return self._equal >= POLLS


async def progressing(awaited: Awaitable[T], what: str, limit: Limit, progress: Progress) -> T:
    """The result, however long it takes, as long as `progress` moves. A reading that does not come within a pause is none.

    Raises StalledError for `what` where it does not. What moves elsewhere moves this process's heartbeat.
    """
    running = asyncio.ensure_future(awaited)
    watch, spent_s, reading = Watch(), 0.0, None
    try:
        while True:
            done, _ = await asyncio.wait({running}, timeout=max(0.0, limit.pause_s - spent_s))
            if done:
                return running.result()
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit.pause_s):
                    reading = await progress()
            spent_s = time.monotonic() - began
            if watch.moved(reading):
                if progress is not heartbeat:
                    beat()
            elif watch.stalled and not running.done():
                raise limit.verdict(what)
    finally:
        if running.cancel():
            await asyncio.wait({running}, timeout=CANCEL_S)
        if running.done() and not running.cancelled():
            running.exception()  # seen: asyncio reports errors that nobody asked for


async def heartbeat() -> object:
    """The progress of what waits for other work of this process."""
    return beats()


@contextlib.asynccontextmanager
async def locked(lock: asyncio.Lock, what: str, limit: Limit) -> AsyncIterator[None]:
    """Hold a lock, for which others wait with the same deadline."""
    taking = asyncio.ensure_future(lock.acquire())
    try:
        await progressing(taking, what, limit, heartbeat)
    except BaseException:
        if taking.done() and not taking.cancelled() and taking.exception() is None:
            lock.release()  # it came at the moment of the end
        raise
    try:
        yield
    finally:
        lock.release()


async def in_own_thread(call: Callable[[], T]) -> T:
    """The result of a call that may hang: no end of this process waits for its thread, as it does for asyncio.to_thread's."""
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def give(setter: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            setter(value)

    def run() -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            setter, value = result.set_exception, error  # type: ignore[assignment]
        else:
            setter = result.set_result
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(give, setter, value)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="may-hang", daemon=True).start()
    outcome: T = await result
    return outcome
