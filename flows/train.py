"""The training run: one parent flow, one subflow an iteration, eight tasks each.

Reads like the recipe it is. What a task does stands in tasks/; what lives between tasks stands in millrace.tasks.runtime.runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from prefect import flow

from millrace.connectors.prefect.server import keep_server
from millrace.connectors.storage.lease import DURATION_S, Lease
from millrace.core.config import RunConfig
from millrace.core.config.problems import render_problems
from millrace.core.errors import ConfigError, StorageError
from millrace.core.hooks import load
from millrace.core.retention import due
from millrace.flows.iteration_slots import in_turn, mine, the_first_of_several
from millrace.flows.preflight.check import check
from millrace.flows.run_record import finish_run_record, open_run_record
from millrace.tasks import report
from millrace.tasks.checkpoint import checkpoint
from millrace.tasks.context import IterationContext
from millrace.tasks.evaluate import evaluate, evaluate_before
from millrace.tasks.filter import filter_groups
from millrace.tasks.publish import publish
from millrace.tasks.reward import reward
from millrace.tasks.rollout import rollout
from millrace.tasks.run_recorded import run_recorded
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.sample_prompts import sample_prompts
from millrace.tasks.stream import Stream
from millrace.tasks.sync_weights import sync_weights
from millrace.tasks.train_step import train_step

log = logging.getLogger(__name__)
driven: ContextVar[Runtime] = ContextVar("driven")  # not a parameter of iterations, which Prefect keeps whole


@flow(name="train", flow_run_name="{config.run.name}")
async def train(config: RunConfig) -> dict[str, Any]:
    """Train `config.run.iterations` iterations, going on from whatever the run folder holds.

    Run again under the same run name it does what is missing; when nothing is, it returns at once.
    """
    if config.algorithm.loss == "sft":
        raise ConfigError(
            "algorithm.loss = sft: that is supervised training; run the flow millrace.flows.sft:sft"
        )
    await prepare(config)
    runtime, started = Runtime(config), time.perf_counter()
    first = await asyncio.to_thread(runtime.run_folder.first_open_iteration)
    runtime.recovery["find"] = time.perf_counter() - started
    if first >= config.run.iterations:
        log.info(
            "run %s is complete: %d iterations in %s", config.run.name, first, runtime.run_folder.store.url
        )
        return {"run": config.run.name, "iterations": first, "did": 0}
    async with driving(runtime) as attempt:
        await open_run_record(runtime, attempt)
        if config.evaluation.sets and first == 0:
            await _evaluate_before(runtime)
        await in_turn(iteration, config, first)
        await finish_run_record(runtime)
    return {"run": config.run.name, "iterations": config.run.iterations, "did": config.run.iterations - first}


async def prepare(config: RunConfig) -> None:
    """Make the files that the configuration says how to make, then check all of it.

    Raises ConfigError with every problem found.
    """
    if config.run.prepare:
        await asyncio.to_thread(load(config.run.prepare, "run.prepare"), config)
    problems = await asyncio.to_thread(check, config, prepared=True)
    if problems:
        raise ConfigError(render_problems(problems))


@flow(name="iteration")
async def iteration(index: int) -> None:
    """One pass of the eight tasks over iteration `index` of the run that is being driven."""
    turn, runtime = mine.get(), driven.get()
    await turn.wait()
    config = runtime.config
    ctx = IterationContext(config, index, runtime, Stream(released=config.rollout.prompts))

    await run_recorded(sample_prompts, ctx)
    with the_first_of_several():
        async with asyncio.TaskGroup() as streaming:
            streaming.create_task(run_recorded(rollout, ctx))
            streaming.create_task(run_recorded(reward, ctx))
            streaming.create_task(run_recorded(filter_groups, ctx))
    await run_recorded(train_step, ctx)
    turn.trained()
    await run_recorded(sync_weights, ctx)
    await run_recorded(checkpoint, ctx)
    last = index + 1 == config.run.iterations
    if config.evaluation.sets and (last or due(index + 1, config.evaluation.every)):
        await run_recorded(evaluate, ctx)
    await run_recorded(publish, ctx)
    turn.over()


async def _evaluate_before(runtime: Runtime) -> None:
    """Held-out accuracy of the untrained policy, kept with iteration 0."""
    record = await run_recorded(evaluate_before, IterationContext(runtime.config, 0, runtime))
    await report.evaluation(runtime, record)


@contextlib.asynccontextmanager
async def driving(runtime: Runtime) -> AsyncIterator[int]:
    """Hold the run's lease, renewed in the background; losing it cancels the flow. Yields the number of this attempt.

    What interrupted writes left is removed first. The run's actors end on leaving, unless another driver has them.
    """
    lease = await asyncio.to_thread(Lease.take, runtime.run_folder.store)
    driver = asyncio.current_task()
    assert driver is not None
    lost: list[Exception] = []

    async def renew() -> None:
        while True:
            await asyncio.sleep(DURATION_S / 6)
            try:
                await asyncio.to_thread(lease.renew)
            except Exception as error:  # noqa: BLE001 - whatever keeps the lease from being renewed ends this driver
                lost.append(error)
                driver.cancel()
                return

    background = [asyncio.create_task(renew()), asyncio.create_task(keep_server())]
    try:
        await asyncio.to_thread(runtime.run_folder.clean)
        await runtime.open()
        driven.set(runtime)
        yield lease.token
    except asyncio.CancelledError:
        if lost:
            raise lost[0] from None
        raise
    finally:
        for task in background:
            task.cancel()
        await runtime.close(end_actors=not lost)
        try:
            await asyncio.to_thread(lease.release)
        except (
            StorageError
        ) as error:  # it would hide why the run stops; the next driver sees that this one ended
            log.warning("%s", error)
