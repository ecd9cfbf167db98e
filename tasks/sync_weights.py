"""sync_weights: bring the trainer's new weights to the engines; each confirms the version before it serves again.

With sync.max_prompt_gap, and for adapters by name, it also compares engines and trainer.
"""

import time

from prefect import task

from millrace.core.contracts.task_records import SyncWeightsRecord
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help
from millrace.tasks.weight_check import compare_engines, fixed_prompts, trainer_logprobs


@task(name="sync_weights", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def sync_weights(ctx: IterationContext) -> SyncWeightsRecord:
    """Bring all engines to the version after this iteration; the record holds seconds by phase.

    Between two syncs (pipeline.sync_every) nothing is sent, and the record names the version that engines keep.
    """
    started, version = time.perf_counter(), ctx.version_after
    if not ctx.sends:
        kept = ctx.config.pipeline.sent_before(ctx.index) * ctx.config.steps_per_iteration
        return {"version": kept, "phases": {}, "seconds": 0.0}
    compares = ctx.config.compares_texts
    prompts = fixed_prompts(ctx) if compares else []
    expected = await trainer_logprobs(ctx, version, prompts) if compares else []
    async with ctx.runtime.board.weights_change():
        phases = await ctx.runtime.memory.update_engines(version)
    await kill_point(ctx.index, "sync_weights", "in")
    record: SyncWeightsRecord = {"version": version, "phases": phases, "seconds": 0.0}
    if compares:
        compared = await compare_engines(ctx, version, prompts, expected)
        record |= {"prompt_gap": compared.gap, "checksums": compared.checksums}
    return {**record, "seconds": time.perf_counter() - started}
