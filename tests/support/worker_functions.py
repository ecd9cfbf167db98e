"""What the worker pool's tests have processes do."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any


def add(first: int, second: int) -> int:
    return first + second


def pid() -> int:
    return os.getpid()


def fail(message: str) -> None:
    raise ValueError(message)


class OddError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def fail_oddly() -> None:
    raise OddError("a", "b")


def time_out_itself() -> None:
    raise TimeoutError("the judge did not answer")


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def hang_deaf(path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    while True:
        time.sleep(1)


def die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def leave(code: int) -> None:
    sys.exit(code)


def vanish() -> None:
    os._exit(3)


def unpicklable() -> Any:
    return threading.Lock()


def graded(path: str, row: dict[str, Any]) -> tuple[float, float, float]:
    """Reward of a row, CPU seconds that took, and MiB by which this process grew."""
    from millrace.core.rewards.scoring import score_sample

    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reward = score_sample(path, {}, row)["reward"]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return reward, time.process_time() - started, grown


def cancel_itself() -> None:
    raise asyncio.CancelledError("the judge's client was closed")


async def _cancelled() -> None:
    raise asyncio.CancelledError


def cancel_its_loop() -> None:
    asyncio.run(_cancelled())


def raise_generator_exit() -> None:
    raise GeneratorExit


def write_pid_and_sleep(path: str, seconds: float) -> int:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(seconds)
    return os.getpid()


def die_the_first_time(path: str) -> str:
    """A signal from outside, as far as the pool can tell."""
    if os.path.exists(path):
        return "done the second time"
    with open(path, "w") as file:
        file.write("died")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def start_a_sleeper() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def start_a_sleeper_and_hang(path: str) -> None:
    with open(path + ".new", "w") as file:
        file.write(str(start_a_sleeper()))
    os.rename(path + ".new", path)
    time.sleep(600)


def close_everything() -> None:
    os.closerange(3, 1024)


class DiesWhereItIsUnpickled:
    """An argument that no worker can take up."""

    def __reduce__(self) -> Any:
        return os._exit, (4,)


class FailsWhereItIsUnpickled:
    """An argument whose module cannot be imported in the worker."""

    def __reduce__(self) -> Any:
        return fail, ("no such module",)


def name_of_failing_result() -> Any:
    return FailsWhereItIsUnpickled()
