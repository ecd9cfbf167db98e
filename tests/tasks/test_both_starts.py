"""Trainer and engines start at the same time: what becomes of it when one or both fail."""

from __future__ import annotations

import asyncio
import logging

import pytest

from millrace.core.errors import ConfigError, EngineError, MillraceError, TrainerMemoryError
from millrace.tasks.runtime.gpu_memory import both


async def fails(error: MillraceError) -> None:
    raise error


async def test_each_begins_before_the_other_has_ended() -> None:
    first, second = asyncio.Event(), asyncio.Event()

    async def meets(mine: asyncio.Event, other: asyncio.Event) -> None:
        mine.set()
        await other.wait()

    async with asyncio.timeout(10):
        await both(meets(first, second), meets(second, first))


async def test_nothing_goes_on_after_an_error_is_raised() -> None:
    ended = []

    async def ends_late() -> None:
        await asyncio.sleep(0.05)
        ended.append(True)

    with pytest.raises(EngineError, match="no engine"):
        await both(fails(EngineError("no engine")), ends_late())
    assert ended


@pytest.mark.parametrize("lasting", [ConfigError("field x"), TrainerMemoryError("lower y")])
async def test_the_error_that_another_start_does_not_fix_is_raised(
    lasting: MillraceError, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(type(lasting), match=str(lasting)):
        await both(fails(EngineError("no engine")), fails(lasting))
    assert "EngineError: no engine" in caplog.text


async def test_both_end_with_the_task_that_waits_for_them() -> None:
    cancelled = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    task = asyncio.create_task(both(waits(), waits()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(cancelled) == 2
