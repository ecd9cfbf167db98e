"""An iteration over another run's stored rollouts (pipeline.rollouts_from). Imports Prefect, which `rollouts_source` must not: a check reads that."""

from millrace.flows.driver.iteration_slots import IterationSlot, Stage
from millrace.tasks.checkpoint import checkpoint
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import filter_groups
from millrace.tasks.generation.stored_rollouts import take_rollouts
from millrace.tasks.publish import publish
from millrace.tasks.run_recorded import run_recorded
from millrace.tasks.train_step import train_step


async def train_stored(ctx: IterationContext, slot: IterationSlot) -> None:
    """Filter, train, save and publish, from another run's stored rollouts and rewards. No engine serves the weights."""
    await take_rollouts(ctx)
    await ctx.stream.release(ctx.released_at_first)
    await run_recorded(filter_groups, ctx)
    await run_recorded(train_step, ctx)
    await slot.reach(Stage.TRAINED)
    await run_recorded(checkpoint, ctx)
    await run_recorded(publish, ctx)
