"""`millrace train`: check a configuration, and run or resume it."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from millrace.connectors.host.local_files import library_log, room_at_home
from millrace.core.contracts.progress import waiting
from millrace.core.errors import MillraceError
from millrace.flows.commands.check import checked_or_exit
from millrace.flows.commands.terminal import (
    ConfigArgument,
    Overrides,
    console,
    errors,
    guarded,
    libraries_kept_off_terminal,
    lines_before_prefect,
    print_lines,
)
from millrace.flows.driver.interruption import run_interruptibly

if TYPE_CHECKING:
    from millrace.core.config import RunConfig
    from millrace.flows.drive import DriveResult


T = TypeVar("T")
log = logging.getLogger(__name__)


def train(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Train a run, or resume it: the same name resumes."""
    from millrace.flows.driver.ending import ending
    from millrace.flows.preflight.plan_seen import run_elsewhere

    def work() -> tuple[RunConfig, DriveResult]:
        found = checked_or_exit(config, overrides)
        if warning := run_elsewhere(found):
            errors.print(warning, soft_wrap=True)
        with room_at_home():
            return found.config, _run_flow(found.config)

    resolved, result = interruptible(work)
    did, total = result["did"], result["iterations"]
    console.print(f"run {resolved.run.name}: {total} iterations complete, {did} of them now")
    print_lines(guarded(lambda: ending(resolved)))


def interruptible(work: Callable[[], T]) -> T:
    """Do the work of a command that starts live parts: signals end it, and output of the parts goes to a log."""
    with libraries_kept_off_terminal() as terminal, lines_before_prefect():
        return guarded(lambda: run_interruptibly(lambda: _not_in_silence(work), terminal))


def _not_in_silence(work: Callable[[], T]) -> T:
    """Do the work. A broken or ended pipe is raised as another error, because Typer ends a command silently at these."""
    try:
        return work()
    except (OSError, EOFError) as error:
        if isinstance(error, EOFError) or error.errno == errno.EPIPE:
            raise RuntimeError("a process that the run talked to is gone") from error
        raise


def _run_flow(config: RunConfig) -> DriveResult:
    """Run the flow of a configuration in this process, against the configured Prefect server or a local one."""
    import httpx

    from millrace.connectors.prefect.patches import say_when_prefect_is_slow
    from millrace.connectors.prefect.server import ensure_server, login_hint, restart_dead_server, ui_url

    console.print(
        f"Prefect: {ui_url(ensure_server())}{login_hint()}; what libraries print: {library_log()}",
        soft_wrap=True,
    )
    # this imports Prefect, which reads the server's address once
    say_when_prefect_is_slow()
    with waiting(log, "libraries, such as torch"):
        if config.algorithm.supervised:
            from millrace.flows.sft import sft as flow
        else:
            from millrace.flows.train import train as flow
    try:
        return asyncio.run(flow(config))
    except (httpx.TransportError, RuntimeError) as error:
        # Prefect retries calls only after it has reached a server once; before, it raises RuntimeError
        if restart_dead_server():
            return asyncio.run(flow(config))
        if isinstance(error, RuntimeError):
            raise
        raise MillraceError(
            f"does not answer ({type(error).__name__}: {error})",
            where=f"the Prefect server at {ensure_server()}",
            remedy="what finished is kept: start the same command again",
        ) from error
