"""rollout: generate the samples of the released groups on the engines and append them as parts.

Reads prompts.parquet and the parts already there; writes rollouts/part-*.parquet as samples finish. Generates only samples
that no part holds. A sample's seed follows from its place in the run, so a sample generated again is the same sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from prefect import task

from millrace.connectors.storage.iteration_files import way_out
from millrace.connectors.storage.parts import read_parts, write_part
from millrace.core.contracts import schema
from millrace.core.contracts.ids import iteration_number, sample_id
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample
from millrace.core.contracts.task_records import RolloutRecord
from millrace.core.garbage import collect_garbage
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help
from millrace.tasks.samples.failures import FailureBudget
from millrace.tasks.samples.generation import Answer, SampleGenerator

PART_WAIT_S = 0.1  # finished samples wait this long for company before they are written
TIDY_AFTER_S = (
    2.0  # all requests are out by then and the loop is idle; later, answers would trigger collections
)

FAILURE = ["sample_id", "status", "reason"]  # columns
Queue = asyncio.Queue[GeneratedSample | None]  # None: no more


@task(name="rollout", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def rollout(ctx: IterationContext) -> RolloutRecord:
    """Generate until the filter has settled every verdict; the record counts samples, tokens and seconds."""
    assert ctx.stream is not None
    started = time.perf_counter()
    groups = await asyncio.to_thread(_read_groups, ctx)
    parts = await asyncio.to_thread(read_parts, ctx.folder, "rollouts", "rollouts", ignore_incomplete=True)
    await asyncio.to_thread(ctx.start_parts, "rollouts")
    finished = set(parts.column("sample_id").to_pylist())
    generator = sample_generator(
        ctx, [row for row in parts.select(FAILURE).to_pylist() if row["status"] == "failed"]
    )
    released = 0
    tidying = asyncio.get_running_loop().call_later(TIDY_AFTER_S, collect_garbage)
    async with part_writer(ctx, generator) as queue, asyncio.TaskGroup() as generating:
        while True:
            revision = ctx.stream.revision
            for group in groups[released : ctx.stream.released]:
                for index in range(ctx.config.rollout.samples_per_prompt):
                    if sample_id(group.group_id, index) not in finished:
                        generating.create_task(_generate(ctx, generator, group, index, queue))
            released = ctx.stream.released
            if ctx.stream.settled:
                break
            await ctx.stream.wait(revision)
    tidying.cancel()
    return {
        "samples_found": len(finished),
        "seconds": time.perf_counter() - started,
        "samples_generated": generator.samples,
        "tokens_generated": generator.tokens,
        "engines_s": generator.engines_s,
        "files": ctx.parts["rollouts"],
    }


def _read_groups(ctx: IterationContext) -> list[DrawnGroup]:
    table = ctx.folder.read_table("prompts.parquet", "prompts").sort_by("ordinal")
    return [DrawnGroup(**row) for row in table.to_pylist()]


def sample_generator(ctx: IterationContext, failed: Iterable[dict[str, str]] = ()) -> SampleGenerator:
    """The iteration's generator. `failed`: rows of failures that an earlier attempt stored."""
    config = ctx.config
    budget = FailureBudget(
        "rollout.max_failed_share",
        config.rollout.max_failed_share,
        config.samples_per_iteration,
        what="failed to generate",
        where=f"iteration {iteration_number(ctx.index)}",
        remedy="fix the cause or raise the share, and start the same command again: what finished is kept. Or "
        f"{way_out(config.run.name, ctx.index)}, which generates its samples anew",
    )
    for row in failed:
        budget.add(row["reason"], row["sample_id"])
    return SampleGenerator(
        config, config.rollout.sampling, lambda: ctx.runtime.memory.for_engines(ctx.version_before), budget
    )


async def _generate(
    ctx: IterationContext, generator: SampleGenerator, group: DrawnGroup, index: int, queue: Queue
) -> None:
    sample = sample_id(group.group_id, index)
    seed = ctx.runtime.prompts.sample_seed(group, index)
    answer = await generator.generate(group.prompt_tokens, seed=seed, rid=sample, session=group.group_id)
    await queue.put(generated_sample(group, index, seed, answer))


def generated_sample(group: DrawnGroup, index: int, seed: int, answer: Answer) -> GeneratedSample:
    """The row of a sample, generated or failed."""
    result, length = answer.generation, len(answer.output_ids)
    return GeneratedSample(
        sample_id=sample_id(group.group_id, index),
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        iteration=group.iteration,
        source=group.source,
        index=index,
        prompt=group.prompt,
        label=group.label,
        metadata=group.metadata,
        tokens=[*group.prompt_tokens, *answer.output_ids],
        response_length=length,
        response=answer.text,
        loss_mask=[1] * length,
        rollout_logprobs=result.logprobs if result else [],
        policy_versions=[
            {"first_token": first, "version": version}
            for first, version in (result.weight_versions if result else [])
        ],
        engine_id=result.engine_id if result else "",
        seed=seed,
        turns=1,
        status=answer.status,
        reason=answer.reason,
        timings=[("started", answer.started), ("generate_s", answer.seconds)],
    )


@asynccontextmanager
async def part_writer(ctx: IterationContext, generator: SampleGenerator) -> AsyncIterator[Queue]:
    """A queue whose rows are written as parts, at once when no other sample is outstanding.

    On leaving, everything queued is written. A write that fails ends the body, which may wait for what will never land.
    """
    queue: Queue = asyncio.Queue()
    limit = ctx.config.rollout.part_groups * ctx.config.rollout.samples_per_prompt

    async def drain() -> None:
        open_ = True
        while open_:
            rows = [await queue.get()]
            deadline = asyncio.get_running_loop().time() + PART_WAIT_S
            while rows[-1] is not None and len(rows) < limit and (generator.outstanding or not queue.empty()):
                try:
                    async with asyncio.timeout_at(deadline):
                        rows.append(await queue.get())
                except TimeoutError:
                    break
            open_ = rows[-1] is not None
            await _write(ctx, [row for row in rows if row is not None])

    async with asyncio.TaskGroup() as group:
        writing = group.create_task(drain())
        try:
            yield queue
        finally:
            await queue.put(None)
            await asyncio.wait([writing])


async def _write(ctx: IterationContext, rows: list[GeneratedSample]) -> None:
    if not rows:
        return
    table = schema.to_table(rows, "rollouts")
    entry = await asyncio.to_thread(write_part, ctx.folder, "rollouts", table, "rollouts")
    ctx.parts["rollouts"].append(entry.record())
    await kill_point(ctx.index, "rollout", "in")
    assert ctx.stream is not None
    await ctx.stream.land("rollouts", entry.path)
