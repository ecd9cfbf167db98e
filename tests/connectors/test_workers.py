"""The pool of killable processes: every way a call can end."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from millrace.connectors.user_code import process
from millrace.connectors.user_code.pool import Outcome, WorkerPool
from tests.support import worker_functions as work
from tests.support.slow_members import slow_but

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


def without_line(outcome: Outcome) -> str:
    """The reason, but for the line that raised."""
    return re.sub(r" in worker_functions\.py, line \d+$", "", str(outcome.reason))


async def test_a_value_comes_back(pool: WorkerPool) -> None:
    outcome = await pool.call(work.add, 1, 2, timeout_s=TIMEOUT_S)
    assert (outcome.kind, outcome.value, outcome.reason) == ("done", 3, None)


async def test_an_exception_is_an_outcome_with_its_reason_and_the_line_of_its_file(pool: WorkerPool) -> None:
    outcome = await pool.call(work.fail, "bad label", timeout_s=TIMEOUT_S)
    line = inspect.getsourcelines(work.fail)[1] + 1
    assert outcome.kind == "failed"
    assert outcome.reason == f"ValueError: bad label in worker_functions.py, line {line}"


async def test_an_exception_that_does_not_survive_pickling_keeps_its_reason(pool: WorkerPool) -> None:
    outcome = await pool.call(work.fail_oddly, timeout_s=TIMEOUT_S)
    assert (outcome.kind, without_line(outcome)) == ("failed", "OddError: a and b")


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
    assert (left.kind, without_line(left)) == ("failed", "SystemExit: 2")
    assert (await pool.call(work.add, 1, 1, timeout_s=TIMEOUT_S)).value == 2


@pytest.mark.parametrize("code", [0, 3])
async def test_a_call_that_ends_its_process_fails_at_once_by_its_exit_code(
    pool: WorkerPool, code: int
) -> None:
    started = time.monotonic()
    outcome = await pool.call(os._exit, code, timeout_s=TIMEOUT_S, again=1)
    assert (outcome.kind, outcome.reason) == (
        "died",
        f"the worker process ended itself with exit code {code}",
    )
    assert time.monotonic() - started < TIMEOUT_S / 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (work.cancel_itself, "CancelledError: the judge's client was closed"),
        (work.cancel_its_loop, "CancelledError"),
        (work.raise_generator_exit, "GeneratorExit"),
        (sys.exit, "SystemExit"),
    ],
)
async def test_what_looks_like_an_end_of_the_task_is_the_calls_failure(
    pool: WorkerPool, function: Callable[[], None], reason: str
) -> None:
    outcome = await pool.call(function, timeout_s=TIMEOUT_S)
    assert (outcome.kind, without_line(outcome)) == ("failed", reason)


@pytest.mark.parametrize("size", slow_but([1, 2, 8], 1, 2))
async def test_workers_killed_while_idle_are_replaced_and_no_call_notices(size: int) -> None:
    pool = WorkerPool(size)
    try:
        for share in (1, size):
            for pid in (await _pids(pool, size))[:share]:
                os.kill(pid, signal.SIGKILL)
            outcomes = await asyncio.gather(
                *(pool.call(work.add, n, 1, timeout_s=TIMEOUT_S) for n in range(20))
            )
            assert [outcome.value for outcome in outcomes] == [n + 1 for n in range(20)]
    finally:
        pool.close()


@pytest.mark.parametrize("size", slow_but([1, 2, 8], 1, 2))
async def test_workers_killed_at_work_cost_their_own_calls_and_no_waiting_one(
    size: int, tmp_path: Path
) -> None:
    pool = WorkerPool(size)
    try:
        files = [tmp_path / str(n) for n in range(size)]
        working = [
            asyncio.ensure_future(pool.call(work.write_pid_and_sleep, str(file), 60, timeout_s=TIMEOUT_S))
            for file in files
        ]
        waiting = [asyncio.ensure_future(pool.call(work.add, n, 1, timeout_s=TIMEOUT_S)) for n in range(20)]
        for file in files:
            os.kill(await _read(file), signal.SIGKILL)
        assert {(await call).reason for call in working} == {"the worker process died of signal 9 (Killed)"}
        assert [(await call).value for call in waiting] == [n + 1 for n in range(20)]
    finally:
        pool.close()


async def test_the_signal_is_named_where_another_thread_collects_the_process(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    waitpid = os.waitpid

    def collected_a_little_later(pid: int, options: int) -> tuple[int, int]:
        looked.append(pid)
        if looked.count(pid) < 5:
            raise ChildProcessError  # what multiprocessing sees between another thread's call and its note of it
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", collected_a_little_later)
    outcome = await pool.call(work.die, signal.SIGKILL, timeout_s=TIMEOUT_S)
    assert (outcome.kind, outcome.reason) == ("died", "the worker process died of signal 9 (Killed)")


async def test_a_call_whose_process_a_signal_killed_is_made_again_as_often_as_asked(
    pool: WorkerPool, tmp_path: Path
) -> None:
    outcome = await pool.call(work.die_the_first_time, str(tmp_path / "a"), timeout_s=TIMEOUT_S, again=1)
    assert outcome.value == "done the second time"
    assert (await pool.call(work.die, signal.SIGKILL, timeout_s=TIMEOUT_S, again=1)).kind == "died"
    never = await pool.call(work.die_the_first_time, str(tmp_path / "b"), timeout_s=TIMEOUT_S)
    assert never.kind == "died"


async def test_an_idle_worker_that_stands_still_is_replaced(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "START_TIMEOUT_S", 3.0)
    os.kill((await pool.call(work.pid, timeout_s=TIMEOUT_S)).value, signal.SIGSTOP)
    assert (await pool.call(work.add, 1, 1, timeout_s=TIMEOUT_S)).value == 2


async def test_a_call_that_no_process_can_take_up_is_an_outcome(pool: WorkerPool) -> None:
    outcome = await pool.call(work.add, work.DiesWhereItIsUnpickled(), 1, timeout_s=TIMEOUT_S)
    assert (outcome.kind, outcome.reason) == ("died", "3 worker processes died before the call began")
    failed = await pool.call(work.add, work.FailsWhereItIsUnpickled(), 1, timeout_s=TIMEOUT_S)
    assert (failed.kind, without_line(failed)) == ("failed", "ValueError: no such module")
    result = await pool.call(work.name_of_failing_result, timeout_s=TIMEOUT_S)
    assert (result.kind, result.reason) == ("failed", "ValueError: no such module")
    closed = await pool.call(work.close_everything, timeout_s=TIMEOUT_S)
    assert closed.kind == "died"
    assert (await pool.call(work.add, 1, 1, timeout_s=TIMEOUT_S)).value == 2


async def test_a_call_that_is_ended_takes_the_processes_it_started_along(
    pool: WorkerPool, tmp_path: Path
) -> None:
    outcome = await pool.call(work.start_a_sleeper_and_hang, str(tmp_path / "a"), timeout_s=2)
    assert outcome.kind == "timed_out"
    await _ended(await _read(tmp_path / "a"))
    call = asyncio.ensure_future(
        pool.call(work.start_a_sleeper_and_hang, str(tmp_path / "b"), timeout_s=TIMEOUT_S)
    )
    sleeper = await _read(tmp_path / "b")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await _ended(sleeper)


async def test_lost_workers_leave_no_thread_process_or_descriptor() -> None:
    pool = WorkerPool(2)
    try:
        await _pids(pool, 2)
        before, lost = _held(), 0
        while lost < 16:
            calls = [pool.call(work.sleep, 0.05, timeout_s=TIMEOUT_S) for _ in range(2)]
            for pid in {outcome.value for outcome in await asyncio.gather(*calls)}:
                os.kill(pid, signal.SIGKILL)
                lost += 1
        await _pids(pool, 2)
        assert _held() == before
    finally:
        pool.close()


async def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = (
        "import asyncio\nfrom millrace.connectors.user_code.pool import WorkerPool\n"
        "from tests.support import worker_functions as work\n"
        "if __name__ == '__main__':\n"
        f"    asyncio.run(WorkerPool(1).call(work.write_pid_and_sleep, {str(tmp_path / 'pid')!r}, 600, timeout_s=600))\n"
    )
    (tmp_path / "driver.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    driver = await asyncio.create_subprocess_exec(
        sys.executable, str(tmp_path / "driver.py"), env=environment
    )
    worker = await _read(tmp_path / "pid")
    driver.kill()
    await driver.wait()
    await _ended(worker)


async def test_workers_leave_no_named_semaphore(tmp_path: Path) -> None:
    """A pool's semaphores stayed in shared memory when all of a run was killed, under names that joblib gives them."""
    import joblib  # noqa: F401 - transformers imports it, and it renames what multiprocessing makes

    pool, before = WorkerPool(2), set(Path("/dev/shm").glob("sem.*"))
    assert (await pool.call(work.add, 1, 2, timeout_s=TIMEOUT_S)).value == 3
    pids = {os.getpid(), *await _pids(pool, 2)}
    made = {path.name for path in set(Path("/dev/shm").glob("sem.*")) - before}
    assert not {name for name in made if any(f"-{pid}-" in name for pid in pids)}
    pool.close()


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


LEAVE_A_SLEEPER = (
    "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=-3, start_new_session={}).pid)"
)


@pytest.mark.parametrize("strange", [False, True])
def test_the_group_of_a_child_that_was_waited_for_is_killed_and_a_strangers_under_its_number_is_not(
    strange: bool,
) -> None:
    """The number of a child may be another process's by then: a run of the same host would end."""
    child = subprocess.Popen(
        [sys.executable, "-c", LEAVE_A_SLEEPER.format(strange)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    sleeper = int(child.communicate()[0])
    process.kill_with_descendants(sleeper if strange else child.pid)
    if strange:
        time.sleep(0.2)
        assert psutil.Process(sleeper).status() == psutil.STATUS_SLEEPING
        os.kill(sleeper, signal.SIGKILL)
    asyncio.run(_ended(sleeper))


async def _pids(pool: WorkerPool, size: int) -> list[int]:
    """The process ids of all of a pool's processes."""
    calls = [pool.call(work.sleep, 0.3, timeout_s=TIMEOUT_S) for _ in range(size)]
    return sorted({outcome.value for outcome in await asyncio.gather(*calls)})


async def _read(file: Path) -> int:
    """A process id, once it is written."""
    deadline = time.monotonic() + TIMEOUT_S
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline, f"no {file}"
        await asyncio.sleep(0.02)
    return int(file.read_text())


async def _ended(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} still lives"
        await asyncio.sleep(0.02)


def _held() -> tuple[int, int, int]:
    """Threads, child processes and descriptors of this process."""
    this = psutil.Process()
    return this.num_threads(), len(this.children()), this.num_fds()
