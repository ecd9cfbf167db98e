"""The pool of killable processes: every way a call can end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millrace.connectors.workers.pool import WorkerPool
from tests.support import worker_functions as work

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


async def test_a_value_comes_back(pool: WorkerPool) -> None:
    outcome = await pool.call(work.add, 1, 2, timeout_s=TIMEOUT_S)
    assert (outcome.kind, outcome.value, outcome.reason) == ("done", 3, None)


async def test_an_exception_is_an_outcome_with_its_reason(pool: WorkerPool) -> None:
    outcome = await pool.call(work.fail, "bad label", timeout_s=TIMEOUT_S)
    assert (outcome.kind, outcome.reason) == ("failed", "ValueError: bad label")


async def test_an_exception_that_does_not_survive_pickling_keeps_its_reason(pool: WorkerPool) -> None:
    outcome = await pool.call(work.fail_oddly, timeout_s=TIMEOUT_S)
    assert (outcome.kind, outcome.reason) == ("failed", "OddError: a and b")


async def test_a_functions_own_time_out_is_a_failure_with_its_message(pool: WorkerPool) -> None:
    outcome = await pool.call(work.time_out_itself, timeout_s=TIMEOUT_S)
    assert outcome.kind == "failed"
    assert "the judge did not answer" in str(outcome.reason)


async def test_a_call_past_its_deadline_loses_its_process_even_if_that_is_deaf(
    pool: WorkerPool, tmp_path: Path
) -> None:
    outcome = await pool.call(work.hang_deaf, str(tmp_path / "pid"), timeout_s=1.0)
    assert outcome.kind == "timed_out"
    assert "1 s" in str(outcome.reason)
    worker = int((tmp_path / "pid").read_text())
    assert (await pool.call(work.add, 1, 1, timeout_s=TIMEOUT_S)).value == 2
    assert not psutil.pid_exists(worker)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_worker_is_replaced(pool: WorkerPool, number: int) -> None:
    outcome = await pool.call(work.die, number, timeout_s=TIMEOUT_S)
    assert outcome.kind == "died"
    assert str(number.value) in str(outcome.reason)
    assert (await pool.call(work.add, 1, 1, timeout_s=TIMEOUT_S)).value == 2


async def test_a_worker_that_leaves_is_an_outcome(pool: WorkerPool) -> None:
    assert (await pool.call(work.vanish, timeout_s=TIMEOUT_S)).kind == "died"
    left = await pool.call(work.leave, 2, timeout_s=TIMEOUT_S)
    assert (left.kind, left.reason) == ("failed", "SystemExit: 2")
    assert (await pool.call(work.add, 1, 1, timeout_s=TIMEOUT_S)).value == 2


async def test_what_cannot_be_pickled_is_a_failure(pool: WorkerPool) -> None:
    result = await pool.call(work.unpicklable, timeout_s=TIMEOUT_S)
    assert result.kind == "failed"
    assert "pickle" in str(result.reason)
    argument = await pool.call(work.add, threading.Lock(), 1, timeout_s=TIMEOUT_S)
    assert argument.kind == "failed"
    assert "pickle" in str(argument.reason)
    assert (await pool.call(work.add, 1, 1, timeout_s=TIMEOUT_S)).value == 2


async def test_the_deadline_counts_from_when_a_process_takes_the_call_up(pool: WorkerPool) -> None:
    outcomes = await asyncio.gather(*(pool.call(work.sleep, 0.6, timeout_s=1.8) for _ in range(8)))
    assert {outcome.kind for outcome in outcomes} == {"done"}
    assert len({outcome.value for outcome in outcomes}) == 2


async def test_a_bad_call_hurts_no_other(pool: WorkerPool) -> None:
    calls = [pool.call(work.die, signal.SIGKILL, timeout_s=TIMEOUT_S)]
    calls += [pool.call(work.add, n, 1, timeout_s=TIMEOUT_S) for n in range(20)]
    died, *others = await asyncio.gather(*calls)
    assert died.kind == "died"
    assert [outcome.value for outcome in others] == [n + 1 for n in range(20)]


async def test_closing_ends_all_processes() -> None:
    pool = WorkerPool(1)
    worker = (await pool.call(work.pid, timeout_s=TIMEOUT_S)).value
    pool.close()
    assert not psutil.pid_exists(worker)
