"""The training run: one parent flow, one subflow an iteration, eight tasks each.

It reads like a recipe. tasks/ has the work of each task, tasks/runtime/ the parts that live between tasks, flows/driver/ the
order of iterations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prefect import Task, flow

from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import EvaluateRecord
from millrace.core.errors import ConfigError, only_first_error
from millrace.core.periodic import due, evaluates_after
from millrace.flows.driver.ahead_guard import lower_ahead
from millrace.flows.driver.drive import DriveResult, drive
from millrace.flows.driver.iteration_slots import IterationSlot, Stage
from millrace.tasks.batching.deferred_groups import receive_deferred
from millrace.tasks.batching.eager_passes import pass_early
from millrace.tasks.checkpoint import begins_after, checkpoint
from millrace.tasks.context import IterationContext
from millrace.tasks.evaluate import evaluate, evaluate_before, is_evaluated_by
from millrace.tasks.filter import filter_groups
from millrace.tasks.generation.stored_rollouts import take_rollouts
from millrace.tasks.publish import publish
from millrace.tasks.reporting import report
from millrace.tasks.reward import reward, take_back_failures
from millrace.tasks.rollout import rollout
from millrace.tasks.run_recorded import run_recorded
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.sample_prompts import sample_prompts
from millrace.tasks.shards.driver import open_evaluation, open_shards
from millrace.tasks.stream import Stream
from millrace.tasks.sync_weights import sync_weights
from millrace.tasks.train_step import hand_over, train_step

EvaluateTask = Task[[IterationContext], Coroutine[Any, Any, EvaluateRecord]]


@flow(name="train", flow_run_name="{config.run.name}")
async def train(config: RunConfig) -> DriveResult:
    """Train `config.run.iterations` iterations, resuming from the state in the run folder."""
    if config.algorithm.supervised:
        raise ConfigError(
            "that is supervised training",
            where="algorithm.loss = sft",
            remedy="run the flow millrace.flows.sft.sft",
        )
    return await drive(config, iteration, flow_name="iteration")


async def iteration(runtime: Runtime, index: int, slot: IterationSlot) -> None:
    """One pass of the eight tasks over iteration `index`; over stored rollouts, only from the filter on."""
    one_pass = _pass_over_stored if runtime.config.pipeline.rollouts_from else _pass
    await one_pass(runtime, index, slot)


async def _pass(runtime: Runtime, index: int, slot: IterationSlot) -> None:
    await slot.may_work()
    if index == 0:
        await evaluate_untrained(runtime)
    await lower_ahead(runtime, index)
    await slot.may_draw()
    config = runtime.config
    ctx = IterationContext(config, index, runtime)
    await run_recorded(sample_prompts, ctx)
    await slot.reach(Stage.DRAWN)
    with only_first_error():
        async with asyncio.TaskGroup() as beside:  # ends before engines get other weights
            evaluated = beside.create_task(_evaluate_in_background(ctx, slot))
            await _fill_batch(ctx, slot, lambda: beside.create_task(hand_over(ctx, evaluated)))
            await slot.reach(Stage.GENERATED)
            await slot.may_train()
            if config.placement.colocate:  # engines sleep while the trainer works
                await evaluated
            await run_recorded(train_step, ctx)
            await slot.reach(Stage.TRAINED)
            await slot.may_sync()
    if config.pipeline.rollouts_only:
        await slot.reach(Stage.SERVED)  # engines have these weights already
    else:
        await _save_and_serve(ctx, slot)
    await slot.reach(Stage.LEFT_TRAINER)
    if evaluates_after(config, index + 1):
        await _evaluate(ctx, evaluate)
    await slot.reach(Stage.LEFT_ENGINES)
    await slot.may_publish()
    await run_recorded(publish, ctx)
    await slot.reach(Stage.DONE)


async def _pass_over_stored(runtime: Runtime, index: int, slot: IterationSlot) -> None:
    """Filter, train, save and publish, from another run's stored rollouts and rewards. No engine serves the weights."""
    await slot.may_work()
    ctx = IterationContext(runtime.config, index, runtime)
    await take_rollouts(ctx)
    ctx.open_stream()
    await run_recorded(filter_groups, ctx)
    await run_recorded(train_step, ctx)
    await slot.reach(Stage.TRAINED)
    await run_recorded(checkpoint, ctx)
    await run_recorded(publish, ctx)
    await slot.reach(Stage.DONE)


async def _save_and_serve(ctx: IterationContext, slot: IterationSlot) -> None:
    """Save a due checkpoint, and make the engines serve the new weights."""
    # on shared GPUs the trainer would take its memory back to save it later; elsewhere engines go on meanwhile
    saves_first = ctx.config.trainer_offloads and begins_after(ctx.config, ctx.index + 1)
    if saves_first:
        await run_recorded(checkpoint, ctx)
    await run_recorded(sync_weights, ctx)
    await slot.reach(Stage.SERVED)
    if not saves_first:
        await run_recorded(checkpoint, ctx)


async def _fill_batch(ctx: IterationContext, slot: IterationSlot, on_generated: Callable[[], object]) -> None:
    """Generate, score and filter groups until the batch is fixed."""
    stream = ctx.open_stream()
    await take_back_failures(ctx)
    async with open_shards(ctx):
        with only_first_error():
            async with asyncio.TaskGroup() as streaming:
                streaming.create_task(receive_deferred(ctx, slot.may_join))
                streaming.create_task(_generate(ctx, stream, on_generated))
                streaming.create_task(_score(ctx, stream))
                streaming.create_task(_until_filled(ctx, stream))
                streaming.create_task(ctx.landed.follow(stream))
                if ctx.eager:
                    streaming.create_task(pass_early(ctx))
                streaming.create_task(report.rollout_progress(ctx))


async def _generate(ctx: IterationContext, stream: Stream, then: Callable[[], object]) -> None:
    await run_recorded(rollout, ctx)
    await stream.begin()  # also if an earlier start left its record
    then()


async def _score(ctx: IterationContext, stream: Stream) -> None:
    # starting a task blocks the event loop for some 20 ms
    await stream.until_begun()
    await run_recorded(reward, ctx)


async def _until_filled(ctx: IterationContext, stream: Stream) -> None:
    """Filter. If an earlier start left its record, the other tasks still learn that the batch is filled."""
    await stream.until_begun()
    await run_recorded(filter_groups, ctx)
    await stream.settle()


async def _evaluate_in_background(ctx: IterationContext, slot: IterationSlot) -> None:
    """Evaluate the weights that this iteration starts with, if that is due and the previous iteration has not."""
    config = ctx.config
    if not config.evaluates_in_background or not config.evaluation.sets:
        return
    await slot.may_evaluate()
    if due(ctx.index, config.evaluation.every) and not await asyncio.to_thread(is_evaluated_by, ctx):
        await report.evaluation(ctx.runtime, await _evaluate(ctx, evaluate_before))


async def _evaluate(ctx: IterationContext, task: EvaluateTask) -> EvaluateRecord:
    async with open_evaluation(ctx):
        return await run_recorded(task, ctx)


async def evaluate_untrained(runtime: Runtime) -> None:
    """Held-out accuracy of the untrained policy, kept in the first iteration's folder."""
    if runtime.config.evaluation.sets and not runtime.config.evaluates_in_background:
        record = await _evaluate(IterationContext(runtime.config, 0, runtime), evaluate_before)
        await report.evaluation(runtime, record)
