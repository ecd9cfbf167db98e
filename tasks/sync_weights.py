"""sync_weights: bring the trainer's new weights to the engines; each confirms the version before it serves again."""

from __future__ import annotations

import time

from prefect import task

from millrace.core.contracts.task_records import SyncWeightsRecord
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help


@task(name="sync_weights", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def sync_weights(ctx: IterationContext) -> SyncWeightsRecord:
    """Bring all engines to the version after this iteration; the record holds seconds by phase."""
    started = time.perf_counter()
    phases = await ctx.runtime.memory.update_engines(ctx.version_after)
    await kill_point(ctx.index, "sync_weights", "in")
    return {"version": ctx.version_after, "phases": phases, "seconds": time.perf_counter() - started}
