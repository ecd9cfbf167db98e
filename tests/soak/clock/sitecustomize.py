"""A wall clock that is off by MILLRACE_SOAK_CLOCK_S seconds, for every Python process with this folder on its PYTHONPATH.

Python imports this module at its start. It moves `time.time`, `time.time_ns` and the built-in `datetime`: what millrace, Prefect
and MLflow read the clock through. What C libraries read, file times and the processes of a Ray head that runs already keep the
machine's clock: a clock below those, as a preloaded library, would also move deadlines that the kernel keeps.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import os
import time
from typing import Any

OFF_S = int(os.environ.get("MILLRACE_SOAK_CLOCK_S", "0"))


def _move(off_s: int) -> None:
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + off_s
    time.time_ns = lambda: nanoseconds() + off_s * 1_000_000_000
    off = datetime.timedelta(seconds=off_s)
    built_in = datetime.datetime.__dict__
    now, utcnow = built_in["now"], built_in["utcnow"]

    def moved_now(cls: Any, tz: datetime.tzinfo | None = None) -> Any:
        return now.__get__(None, cls)(tz) + off

    def moved_utcnow(cls: Any) -> Any:
        return utcnow.__get__(None, cls)() + off

    # the class stays the one that C code makes instances of; only its own dictionary can be changed, as no attribute of it can
    (methods,) = gc.get_referents(built_in)
    methods.update(now=classmethod(moved_now), utcnow=classmethod(moved_utcnow), today=classmethod(moved_now))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))


if OFF_S:
    _move(OFF_S)
