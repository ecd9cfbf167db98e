"""The training run: one parent flow, one subflow an iteration, eight tasks each.

tasks/ has the work of each task, tasks/runtime/ the parts that live between tasks, flows/driver/ the order of iterations.
"""

from collections.abc import Callable

from prefect import flow

from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError, together
from millrace.flows.drive import DriveResult, drive
from millrace.flows.driver.iteration_slots import (
    IterationSlot,
    Stage,
    evaluate_beside,
    evaluate_if_due,
    evaluate_untrained,
    lower_ahead,
)
from millrace.flows.driver.stored_rollouts import train_stored
from millrace.tasks.batching.deferred_groups import receive_deferred
from millrace.tasks.batching.eager_passes import pass_early
from millrace.tasks.checkpoint import begins_after, checkpoint
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import filter_groups
from millrace.tasks.publish import publish
from millrace.tasks.reporting import report
from millrace.tasks.reward import reward, take_back_failures
from millrace.tasks.rollout import rollout
from millrace.tasks.run_recorded import run_recorded
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.sample_prompts import sample_prompts
from millrace.tasks.shards.driver import open_shards
from millrace.tasks.sync_weights import sync_weights
from millrace.tasks.train_step import hand_over, train_step


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
    config, ctx = runtime.config, IterationContext(runtime, index)
    if config.pipeline.rollouts_from:
        await train_stored(ctx, slot)
        return
    if index == 0:
        await evaluate_untrained(runtime)
    await lower_ahead(runtime, index)
    await slot.may_draw()
    await run_recorded(sample_prompts, ctx)
    await slot.reach(Stage.DRAWN)
    async with together() as beside:  # ends before engines get other weights
        evaluated = beside.create_task(evaluate_beside(ctx, slot))
        await _fill_batch(ctx, slot, lambda: beside.create_task(hand_over(ctx, evaluated)))
        await slot.reach(Stage.GENERATED)
        await slot.may_train()
        if config.placement.colocate:  # engines sleep while the trainer works
            await evaluated
        await run_recorded(train_step, ctx)
        await slot.reach(Stage.TRAINED)
        await slot.may_sync()
    if not config.pipeline.rollouts_only:
        await _save_and_serve(ctx, slot)
    await slot.reach(Stage.LEFT_TRAINER)
    await evaluate_if_due(ctx)
    await slot.reach(Stage.LEFT_ENGINES)
    await slot.may_publish()
    await run_recorded(publish, ctx)


async def _fill_batch(ctx: IterationContext, slot: IterationSlot, on_generated: Callable[[], object]) -> None:
    """Generate, score and filter groups at once, until the batch is fixed."""
    await ctx.stream.release(ctx.released_at_first)
    await take_back_failures(ctx)
    async with open_shards(ctx) as ctx, together() as streaming:
        streaming.create_task(receive_deferred(ctx, slot.may_join))
        streaming.create_task(_generate(ctx, on_generated))
        streaming.create_task(_score(ctx))
        streaming.create_task(_until_filled(ctx))
        streaming.create_task(ctx.landed.follow(ctx.stream))
        streaming.create_task(pass_early(ctx))
        streaming.create_task(report.rollout_progress(ctx))


async def _generate(ctx: IterationContext, then: Callable[[], object]) -> None:
    await run_recorded(rollout, ctx)
    await ctx.stream.begin()  # also if an earlier start left its record
    then()


async def _score(ctx: IterationContext) -> None:
    await ctx.stream.until_begun()
    await run_recorded(reward, ctx)


async def _until_filled(ctx: IterationContext) -> None:
    await ctx.stream.until_begun()
    await run_recorded(filter_groups, ctx)
    await ctx.stream.settle()  # also if an earlier start left its record


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
