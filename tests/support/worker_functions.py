"""What the worker pool's tests have processes do."""

from __future__ import annotations

import os
import resource
import signal
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
