"""A wait that fails after a time limit without progress. With progress it may take any time.

    ranks = await progressing(asyncio.gather(*calls), "train on 8 ranks", limit, progress)

It raises StalledError after POLLS readings in a row without progress. Readings are counted, not seconds: a host that slept, or
a process that was stopped and continued, is no stall. The awaited call is cancelled; the caller must end processes that hang.
"""

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from millrace.core.errors import StalledError

IO_STEP = 64 * 2**20  # bytes; idle threads of Ray and gloo read and write less in an hour
_count = 0


def beat() -> None:
    """Count a piece of work."""
    global _count
    # two threads that beat at once may count as one
    _count += 1


def beats() -> int:
    """The counter."""
    return _count


def pulse() -> tuple[int, int]:
    """The counter, and the bytes that this process has read and written: loading a large checkpoint is progress too."""
    return _count, (bytes_moved("self") or 0) // IO_STEP


def bytes_moved(process: int | str) -> int | None:
    """Bytes that a process has read and written; None if the system does not say."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except OSError:
        return None
    known = dict(line.split(": ") for line in lines)
    return sum(int(known.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))


T = TypeVar("T")
POLLS = 4  # readings per limit, so that a stall is noticed at most a quarter of the limit late
CANCEL_S = 5.0  # time for a cancelled call to end

Progress = Callable[[], Awaitable[object]]
"""A reading that changes whenever something gets done."""


@dataclass(frozen=True)
class Limit:
    """The longest time without progress."""

    seconds: float
    setting: str = "run.progress_timeout_s"  # the field that changes it

    @property
    def pause_s(self) -> float:
        """Seconds between two readings."""
        return self.seconds / POLLS

    def verdict(self, what: str, seen: str = "") -> StalledError:
        """The error of a wait for `what`. seen: what is known of the parts without progress."""
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
        """Take a reading; returns whether it differs from the previous one. The first reading does."""
        if reading == self._last:
            self._equal += 1
            return False
        self._last, self._equal = reading, 0
        return True

    @property
    def stalled(self) -> bool:
        """Whether there was no progress for the limit."""
        return self._equal >= POLLS


async def progressing(awaited: Awaitable[T], what: str, limit: Limit, progress: Progress) -> T:
    """The result of `awaited`, which may take any time as long as `progress` changes.

    A reading that takes longer than a pause is ignored.

    Raises StalledError for `what` if it does not change. Progress here also moves this process's heartbeat.
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
            # mark the error as seen: asyncio reports errors that nobody retrieved
            running.exception()


async def heartbeat() -> object:
    """The progress of a wait for other work of this process."""
    return beats()


@contextlib.asynccontextmanager
async def locked(lock: asyncio.Lock, what: str, limit: Limit) -> AsyncIterator[None]:
    """Hold a lock, for which others wait with the same deadline."""
    taking = asyncio.ensure_future(lock.acquire())
    try:
        await progressing(taking, what, limit, heartbeat)
    except BaseException:
        if taking.done() and not taking.cancelled() and taking.exception() is None:
            # the lock was acquired just as the wait ended
            lock.release()
        raise
    try:
        yield
    finally:
        lock.release()


async def in_own_thread(call: Callable[[], T]) -> T:
    """The result of a call that may hang: the process can exit without its thread, unlike with asyncio.to_thread."""
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def give(setter: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            setter(value)

    def run() -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            setter, value = result.set_exception, error  # type: ignore[assignment]
        else:
            setter = result.set_result
        # the loop may have ended
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(give, setter, value)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="may-hang", daemon=True).start()
    outcome: T = await result
    return outcome
