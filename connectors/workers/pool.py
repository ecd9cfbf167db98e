"""A pool of CPU processes for user code that may hang or crash.

Owns the processes and the outcome of each call. Knows nothing of what is called. A call that passes its deadline costs its
process, which pebble replaces, and not the pool.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call: a value, or the reason why there is none."""

    kind: Literal["done", "failed", "timed_out", "died"]
    value: Any = None
    reason: str | None = None


class WorkerPool:
    """Runs picklable module-level functions in killable processes."""

    def __init__(self, workers: int) -> None:
        self._pool = ProcessPool(max_workers=workers, context=multiprocessing.get_context("spawn"))

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Outcome:
        """Run one call. The timeout counts from when a process starts it. An error in the call is an outcome, not raised."""
        future = self._pool.schedule(_run, args=(function, *args), timeout=timeout_s)
        try:
            kind, value = await asyncio.wrap_future(future)
        except TimeoutError:
            return Outcome("timed_out", reason=f"no answer within {timeout_s:g} s")
        except ProcessExpired as error:
            return Outcome("died", reason=f"the worker process died of {_cause(error.exitcode)}")
        except (CancelledError, asyncio.CancelledError):
            future.cancel()  # type: ignore[no-untyped-call]
            raise
        except Exception as error:  # noqa: BLE001 - arguments or results that cannot be pickled raise anything
            return Outcome("failed", reason=f"{type(error).__name__}: {error}")
        return Outcome("done", value) if kind == "done" else Outcome("failed", reason=value)

    def close(self) -> None:
        """Stop all processes at once."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()


def _run(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """Runs in the worker. Returns an error as text: exceptions of user code may not survive pickling."""
    try:
        return "done", function(*args)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - kept with its sample
        return "failed", f"{type(error).__name__}: {error}"


def _cause(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code < 0:
        return f"signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"exit code {exit_code}"
