"""Ctrl-C and SIGTERM end a command in time wherever its work is, and its last line says how to go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.support.slow_members import slow_but

PREFIX = """
import asyncio, os, signal, sys, threading, time
from millrace.flows.driver import interruption
from millrace.flows.driver.interruption import on_signal, run_interruptibly

interruption.DEADLINE_S, interruption.REPORT_S = 2.0, 0.5

def ready():
    print("ready", flush=True)
"""
WAITS = """
async def main():
    task = asyncio.current_task()
    with on_signal(task.cancel), on_signal(lambda: print("actors killed", flush=True)):
        try:
            ready()
            await asyncio.sleep(60)
        finally:
            print("cleaned up", flush=True)
run_interruptibly(lambda: asyncio.run(main()))
"""
WORK = {
    "waiting": WAITS,
    "a thread that does not end": WAITS.replace("asyncio.sleep(60)", "asyncio.to_thread(time.sleep, 60)"),
    "a blocked event loop": """
async def main():
    with on_signal(asyncio.current_task().cancel):
        ready()
        time.sleep(60)
run_interruptibly(lambda: asyncio.run(main()))
""",
    "a clean-up that does not end": """
async def main():
    with on_signal(asyncio.current_task().cancel):
        try:
            ready()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(60)
run_interruptibly(lambda: asyncio.run(main()))
""",
    "before anything lives": """
def work():
    ready()
    time.sleep(60)
run_interruptibly(work)
""",
}
CLEANS_UP = ("waiting", "a thread that does not end", "before anything lives")

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script in a process group of its own and waits until its work is under way."""
    started: list[subprocess.Popen[str]] = []

    def run(script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PREFIX + script, "train", "run.yaml"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert _first_line(process.stdout.fileno()) == b"ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def _first_line(pipe: int) -> bytes:
    """Read no further than the line: `communicate` reads the pipe itself and never sees what a buffer holds."""
    line = b""
    while not line.endswith(b"\n") and (got := os.read(pipe, 1)):
        line += got
    return line


@pytest.mark.parametrize(
    ("where", "number"),
    slow_but(
        product(WORK, [signal.SIGINT, signal.SIGTERM]),
        *[(where, (signal.SIGINT, signal.SIGTERM)[number % 2]) for number, where in enumerate(WORK)],
    ),
)
def test_the_command_ends_in_time_with_its_own_code_and_says_how_to_go_on(
    start: Start, where: str, number: signal.Signals
) -> None:
    process = start(WORK[where])
    os.killpg(process.pid, number)
    out, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[number]
    last = f"Ended by {name}; what finished is kept, and the same command goes on: millrace train run.yaml"
    assert said.splitlines()[-1] == last
    assert "Traceback" not in said
    assert (said.splitlines() == [last]) == (where in CLEANS_UP)
    assert ("processes of the run may be left" in said) == (where not in CLEANS_UP)
    if where == "waiting":
        assert out.splitlines() == ["actors killed", "cleaned up"]


def test_a_second_ctrl_c_ends_at_once(start: Start) -> None:
    process = start(
        WORK["a clean-up that does not end"].replace(
            "ready()", "interruption.DEADLINE_S, interruption.PATIENCE_S = 60.0, 0.0; ready()"
        )
    )
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Ctrl-C: ")
    began = time.perf_counter()
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.perf_counter() - began < 20
    assert "Ended at once" in said
    assert "`millrace stop RUN`" in said


def test_a_signal_that_the_command_was_told_to_ignore_stays_ignored(start: Start) -> None:
    process = start(
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nrun_interruptibly(lambda: (ready(), time.sleep(1)))"
    )
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0


def test_results_and_errors_come_out_of_the_work_as_they_are(start: Start) -> None:
    process = start("ready()\nprint(run_interruptibly(lambda: 3))\nrun_interruptibly(lambda: sys.exit(2))")
    assert process.communicate(timeout=30) == ("3\n", "")
    assert process.returncode == 2


def test_ctrl_c_is_no_outcome_of_a_sample_that_is_being_scored(start: Start) -> None:
    script = """
from millrace.connectors.user_code.pool import WorkerPool

async def main():
    pool = WorkerPool(1)
    assert (await pool.call(abs, -1, timeout_s=60)).value == 1
    with on_signal(lambda: None):
        ready()
        print(await pool.call(time.sleep, 1.5, timeout_s=60), flush=True)
        pool.close()
if __name__ == "__main__":
    run_interruptibly(lambda: asyncio.run(main()))
"""
    process = start(script)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert "kind='done'" in out
