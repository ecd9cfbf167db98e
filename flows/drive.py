"""Drive a run: check it, hold its lease, run the missing iterations, keep run.json.

train and sft share it; each defines what an iteration does.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypedDict, cast

import httpx
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from prefect.states import Cancelled

from millrace.connectors.host.garbage import collect_whole_when_asked, use_few_heaps
from millrace.connectors.host.local_files import bound_logs, keep_private, log_folder
from millrace.connectors.host.own_addresses import reach_own_directly
from millrace.connectors.host.own_folders import remove_dead_folders
from millrace.connectors.prefect.flow_run_state import (
    cancel_ended,
    cancel_interrupted,
    of_deployment,
    until_suspended,
)
from millrace.connectors.prefect.patches import say_when_prefect_is_slow
from millrace.connectors.prefect.run_errors import log_errors_once
from millrace.connectors.prefect.run_page import emit_run_event, log_to_page, tags
from millrace.connectors.prefect.server import keep_server
from millrace.connectors.storage.iteration_files import commit_again
from millrace.connectors.storage.lease import Lease, duration_s, take_over
from millrace.core.config import RunConfig
from millrace.core.config.parts.problems import render_problems
from millrace.core.contracts.progress import waiting
from millrace.core.errors import (
    ConfigError,
    LeaseHeldError,
    MillraceError,
    StalledError,
    StorageError,
    may_pass,
)
from millrace.core.hooks.loading import call_function, expect, search_in
from millrace.core.plain_text import take_any_text
from millrace.core.tracker import run_tags
from millrace.core.waits import in_own_thread
from millrace.flows.driver.fingerprints import own_modules
from millrace.flows.driver.interruption import in_command, interrupted_by, on_signal
from millrace.flows.driver.iteration_slots import IterationSlot, begin_subflows, run_iterations
from millrace.flows.driver.named_model import ModelHere, model_here, settled
from millrace.flows.driver.run_record import (
    finish_run_record,
    is_complete,
    open_run_record,
    record_end,
    record_verdict,
    run_id,
)
from millrace.flows.preflight.check import check
from millrace.tasks.runtime.gpu_memory import GpuMemory, StoredWeights
from millrace.tasks.runtime.orphans import join_and_end_orphans
from millrace.tasks.runtime.runtime import Runtime

log = logging.getLogger(__name__)
LOGS_EVERY_S = 600.0

Iteration = Callable[[Runtime, int, IterationSlot], Coroutine[Any, Any, None]]


class DriveResult(TypedDict):
    """Result of a flow: the run, its iterations, and the number that this flow run did."""

    run: str
    iterations: int
    did: int


async def drive(
    config: RunConfig,
    iteration: Iteration,
    flow_name: str,
) -> DriveResult:
    """Run `iteration` for every index that the run folder does not hold yet, each as a flow run of the flow `flow_name`.

    Started again under the same run name, it runs the missing iterations; if none is missing, it returns at once.
    Ctrl-C, SIGTERM and a cancelled flow run end it at once, and its actors with it.
    If another process drives the run, a deployment's flow run ends as refused; any other raises LeaseHeldError.
    """
    driver = asyncio.current_task()
    assert driver is not None
    keep_private()
    take_any_text()
    reach_own_directly()
    use_few_heaps()
    collect_whole_when_asked()
    log_to_page()
    say_when_prefect_is_slow()
    log_errors_once(by_command=in_command())
    began = datetime.now(UTC)
    try:
        with on_signal(driver.cancel):
            return await _drive(config, iteration, flow_name)
    except Pause:
        message = "Paused. What finished is kept; after Resume it continues as a new flow run."
        await asyncio.to_thread(cancel_interrupted, str(flow_run.id), began, message)
        raise
    except asyncio.CancelledError:
        by = interrupted_by()
        if by is None or of_deployment():
            raise
        driver.uncancel()
        message = f"Ended by {by}. What finished is kept, and the same command goes on."
        # the command waits until the flow runs' states are set
        with on_signal(lambda: None):
            await asyncio.to_thread(cancel_ended, str(flow_run.id), message)
        # Prefect takes the returned state as the end's state
        return cast(DriveResult, Cancelled(message=message))
    except (MillraceError, httpx.TransportError) as error:
        if isinstance(error, httpx.TransportError) or may_pass(error):
            emit_run_event("may-go-on")
        raise
    finally:
        emit_run_event("left")


async def _record_end(runtime: Runtime, lease: Lease, error: BaseException) -> None:
    """Note how this attempt ends, while this driver holds the run. A failure is only logged: the end's reason matters more."""
    by = "a pause" if isinstance(error, Pause) else interrupted_by()
    if by is None and isinstance(error, asyncio.CancelledError):
        by = "a cancellation"
    try:
        if not await asyncio.to_thread(lease.may_be_lost):
            await record_end(runtime, lease.token, by, error)
    except (MillraceError, OSError) as failed:
        log.warning("run.json does not record how this start ended: %s", failed)


async def _drive(
    config: RunConfig,
    iteration: Iteration,
    flow_name: str,
) -> DriveResult:
    here = await _prepare(config)
    config = config.with_dtype(here.config.dtype)
    await asyncio.to_thread(_bound_logs, config)
    memory = StoredWeights if config.pipeline.rollouts_only else GpuMemory
    runtime, started = Runtime(here.config, memory), time.perf_counter()
    first = await asyncio.to_thread(runtime.run_folder.first_open_iteration, strict=False)
    runtime.recovery.add(find=time.perf_counter() - started)
    if first >= config.run.iterations and await asyncio.to_thread(is_complete, runtime.run_folder.store):
        # these are this run's own if its driver was killed after the last iteration
        for sentence in await in_own_thread(join_and_end_orphans):
            log.warning("%s", sentence)
        log.info(
            "run %s is complete: %d iterations in %s", config.run.name, first, runtime.run_folder.store.url
        )
        return {"run": config.run.name, "iterations": first, "did": 0}
    try:
        lease = await asyncio.to_thread(Lease.take, runtime.run_folder.store)
    except LeaseHeldError as error:
        if not of_deployment():
            raise
        log.warning("%s", error)
        return cast(
            DriveResult, Cancelled(name="Refused", message=str(error))
        )  # Prefect takes it as the end's state
    async with _leased(runtime, lease) as attempt:
        await asyncio.to_thread(commit_again, runtime.run_folder)
        # it may refuse this start, so it comes before any change of the iterations
        await open_run_record(runtime, attempt, config, here.commit)
        first = await asyncio.to_thread(take_over, runtime.run_folder)
        try:
            begin_subflows(attempt)
            with tags(*run_tags(config)):
                await run_iterations(
                    partial(iteration, runtime),
                    flow_name,
                    config,
                    first,
                    lambda index: runtime.prompts.ahead.at(index),
                )
        except StalledError as error:
            await record_verdict(runtime, error)
            raise
        await finish_run_record(runtime)
    return {
        "run": config.run.name,
        "iterations": config.run.iterations,
        "did": max(0, config.run.iterations - first),
    }


async def _prepare(config: RunConfig) -> ModelHere:
    """Call `run.prepare`, download a named model, then check everything.

    Returns the configuration with the model's folder on this host and the type of its weights. Raises ConfigError with
    every problem.
    """
    expect({})  # forget hashes of an earlier run in this process
    search_in(config.run.import_from)
    if config.run.prepare:
        with waiting(log, "run.prepare"):
            await asyncio.to_thread(call_function, config.run.prepare, "run.prepare", config)
    with waiting(log, f"the files of {config.model.path}"):
        here = await asyncio.to_thread(model_here, config)
    with waiting(log, "the check of model, data and reward"):
        problems = await asyncio.to_thread(check, here.config, prepared=True)
    if problems:
        raise ConfigError(render_problems(problems))
    expect(await asyncio.to_thread(own_modules, here.config))
    return here._replace(config=await asyncio.to_thread(settled, here.config))


def _bound_logs(config: RunConfig) -> None:
    bound_logs(log_folder(config.storage.root, config.run.name))


async def _keep_logs_bounded(config: RunConfig) -> None:
    """Bound the logs again and again; runs until cancelled."""
    while True:
        await asyncio.sleep(LOGS_EVERY_S)
        await asyncio.to_thread(_bound_logs, config)


@contextlib.asynccontextmanager
async def _leased(runtime: Runtime, lease: Lease) -> AsyncIterator[int]:
    """Hold the run's lease with the runtime open; yields the number of this attempt.

    A background task renews the lease; when it is lost, or the flow run is paused, the flow is cancelled. Remains of
    interrupted writes are removed first. The run's actors end on leaving, unless another driver has taken the lease and with it
    the actors.
    """
    driver = asyncio.current_task()
    assert driver is not None
    ends: list[BaseException] = []  # reasons why this driver ends itself

    async def renew() -> None:
        while True:
            await asyncio.sleep(duration_s() / 6)
            try:
                await asyncio.to_thread(lease.renew)
            except Exception as error:  # noqa: BLE001 - any failure to renew the lease ends this driver
                ends.append(error)
                driver.cancel()
                return

    async def pause() -> None:
        ends.append(await until_suspended())
        driver.cancel()

    background = [asyncio.create_task(renew()), asyncio.create_task(keep_server())]
    # Prefect pauses only flow runs of deployments
    if of_deployment():
        background.append(asyncio.create_task(pause()))
    background.append(asyncio.create_task(_keep_logs_bounded(runtime.config)))
    try:
        runtime.drive_under(lease, await asyncio.to_thread(run_id, runtime.run_folder.store))
        await asyncio.to_thread(runtime.run_folder.clean)
        await asyncio.to_thread(remove_dead_folders)
        with on_signal(runtime.kill_actors):
            await runtime.open()
            yield lease.token
    except BaseException as error:
        ended = ends[0] if ends and isinstance(error, asyncio.CancelledError) else error
        await _record_end(runtime, lease, ended)
        if ended is not error:
            raise ended from None
        raise
    finally:
        for task in background:
            task.cancel()
        await runtime.close(end_actors=not await asyncio.to_thread(lease.may_be_lost))
        try:
            await asyncio.to_thread(lease.release)
        except (
            StorageError
        ) as error:  # raised, it would hide why the run stops; the next driver sees a dead owner
            log.warning("%s", error)
