"""A wait ends by a typed error where nothing moves, and never while something does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.core.errors import StalledError, may_pass
from millrace.core.waits import (
    POLLS,
    Limit,
    Watch,
    beat,
    beats,
    bytes_moved,
    heartbeat,
    in_own_thread,
    locked,
    progressing,
    pulse,
)

SHORT = Limit(0.2)
PATIENCE_S = 20.0


async def still() -> object:
    return 0


async def moving() -> object:
    return time.monotonic()


async def silent() -> object:
    return await asyncio.Event().wait()


async def test_what_takes_longer_than_the_limit_and_moves_is_waited_for() -> None:
    async def slow() -> str:
        await asyncio.sleep(5 * SHORT.seconds)
        return "done"

    assert await progressing(slow(), "slow", SHORT, moving) == "done"


@pytest.mark.parametrize("progress", [still, silent])
async def test_a_stall_names_what_is_awaited_how_long_nothing_moved_the_setting_and_a_remedy(
    progress: object,
) -> None:
    ended = asyncio.Event()

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    began = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StalledError) as caught:
            await progressing(stuck(), "train of trainer-0", SHORT, progress)  # type: ignore[arg-type]
    assert time.monotonic() - began > SHORT.seconds
    assert ended.is_set(), "what was awaited is cancelled"
    said = str(caught.value)
    assert said.startswith("train of trainer-0: nothing moved for 0.2 s (run.progress_timeout_s); raise ")
    assert "start the same command again" in caught.value.remedy
    assert not may_pass(caught.value), "no restart by itself: it would walk into the same"


async def test_an_error_comes_as_it_is_and_at_once() -> None:
    async def broken() -> None:
        raise KeyError("a bug")

    began = time.monotonic()
    with pytest.raises(KeyError, match="a bug"):
        await progressing(broken(), "broken", Limit(600.0), still)
    assert time.monotonic() - began < PATIENCE_S


async def test_cancelling_the_wait_cancels_what_is_awaited() -> None:
    ended = asyncio.Event()

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(progressing(stuck(), "stuck", Limit(600.0), still))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


def test_looks_are_counted_so_that_a_host_that_slept_is_no_stall() -> None:
    watch = Watch()
    assert watch.moved(1)
    for _ in range(POLLS - 1):
        assert not watch.moved(1)
    assert not watch.stalled
    assert watch.moved(2)
    for _ in range(POLLS):
        watch.moved(2)
    assert watch.stalled


async def test_who_waits_for_this_process_goes_on_while_anything_gets_done_in_it() -> None:
    done = asyncio.Event()

    async def work() -> None:
        for _ in range(20):
            await asyncio.sleep(SHORT.seconds / 8)
            beat()
        done.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(work())
        assert await progressing(done.wait(), "work", SHORT, heartbeat)


async def test_what_moves_elsewhere_is_progress_here_and_waiting_alone_is_none() -> None:
    before = beats()
    await progressing(asyncio.sleep(SHORT.seconds), "elsewhere", SHORT, moving)
    assert beats() > before
    before = beats()
    await progressing(asyncio.sleep(SHORT.seconds), "here", SHORT, heartbeat)
    assert beats() == before


async def test_who_waits_for_a_lock_whose_holder_is_stuck_is_told_and_the_lock_stays_whole() -> None:
    lock = asyncio.Lock()
    async with locked(lock, "the trainer", SHORT):
        with pytest.raises(StalledError, match="the trainer: nothing moved"):
            async with locked(lock, "the trainer", SHORT):
                raise AssertionError("two at once")
        assert lock.locked()
    async with asyncio.timeout(PATIENCE_S), locked(lock, "the trainer", SHORT):
        assert lock.locked()
    assert not lock.locked()


async def test_a_lock_that_comes_as_its_waiter_is_cancelled_is_given_back() -> None:
    lock = asyncio.Lock()

    async def wait() -> None:
        async with locked(lock, "it", Limit(600.0)):
            await asyncio.sleep(0)

    for pauses in range(6):  # the moment of the cancel, step by step
        await lock.acquire()
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        lock.release()
        for _ in range(pauses):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not lock.locked()


async def test_a_call_in_its_own_thread_gives_its_result_or_error() -> None:
    assert await in_own_thread(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(lambda: 1 // 0)


def test_a_call_that_hangs_in_its_own_thread_does_not_keep_the_process() -> None:
    program = (
        "import asyncio, threading\n"
        "from millrace.core.waits import *\n"
        "async def main():\n"
        "    await progressing(in_own_thread(threading.Event().wait), 'it', Limit(0.1), heartbeat)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "StalledError: it: nothing moved for 0.1 s" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say")
def test_what_a_process_reads_and_writes_is_counted(tmp_path: Path) -> None:
    before = bytes_moved(os.getpid()) or 0
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    assert (bytes_moved(os.getpid()) or 0) - before >= 100_000
    assert pulse()[0] == beats()
    assert bytes_moved(2**30) is None  # no such process
