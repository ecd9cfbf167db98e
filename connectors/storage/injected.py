"""Storage faults on demand, for tests: every operation of a Store fails as on a bad network or a full disk.

Off unless environment variables turn it on, which actors inherit. MILLRACE_STORAGE_FAULTS=<share>[:<seed>] fails
that share of operations with an I/O error, half of them after they took effect. MILLRACE_STORAGE_FULL=<file> fails
every write with "no space left on device" for as long as that file exists.
"""

import errno
import os
import random
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")


def injected(verb: str, call: Callable[[], Result]) -> Callable[[], Result]:
    """The call, made to fail as the environment variables say."""
    faults, full = os.environ.get("MILLRACE_STORAGE_FAULTS"), os.environ.get("MILLRACE_STORAGE_FULL")
    if not faults and not full:
        return call

    def faulty() -> Result:
        if full and verb == "write" and os.path.exists(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not faults:
            return call()
        share, numbers = _plan(faults, os.getpid())
        fails, late = numbers.random() < share, numbers.random() < 0.5
        if fails and not late:
            raise OSError(errno.EIO, f"injected before the {verb}")
        result = call()
        if fails:
            raise OSError(errno.EIO, f"injected after the {verb}")
        return result

    return faulty


@lru_cache(maxsize=1)
def _plan(faults: str, pid: int) -> tuple[float, random.Random]:
    """Share of operations that fail, and this process's random numbers."""
    share, _, seed = faults.partition(":")
    return float(share), random.Random(f"{seed}/{pid}")
