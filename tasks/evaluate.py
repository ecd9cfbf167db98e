"""evaluate: sample the held-out sets with the engines' current weights and score them.

Writes eval/<set>/NNNNNN.parquet, named by the iterations trained so far. Same engines, same reward as training.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pyarrow as pa
from prefect import task

from millrace.core.config.training import EvalSet
from millrace.core.contracts import schema
from millrace.core.contracts.ids import derived_seed
from millrace.core.contracts.task_records import EvaluateRecord
from millrace.tasks.context import IterationContext
from millrace.tasks.run_recorded import may_help


@task(name="evaluate", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def evaluate(ctx: IterationContext) -> EvaluateRecord:
    """Evaluate every set after this iteration; the record holds mean reward by set."""
    return await evaluate_version(ctx, done=ctx.index + 1, version=ctx.version_after)


@task(name="evaluate_before", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def evaluate_before(ctx: IterationContext) -> EvaluateRecord:
    """Evaluate every set before the first iteration."""
    return await evaluate_version(ctx, done=ctx.index, version=ctx.version_before)


async def evaluate_version(ctx: IterationContext, done: int, version: int) -> EvaluateRecord:
    """Evaluate all sets at a weight version and write one table a set."""
    started = time.perf_counter()
    results: dict[str, Any] = {}
    for held_out in ctx.config.evaluation.sets:
        rows = await _evaluate_set(ctx, held_out, version)
        table = pa.Table.from_pylist(rows, schema=schema.schema("evaluations"))
        path = f"eval/{held_out.name}/{done:06d}.parquet"
        entry = await asyncio.to_thread(ctx.run_folder.store.write_table, path, table, "evaluations")
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        results[held_out.name] = {
            "file": entry.record(),
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            "samples": len(rows),
            "not_scored": len(rows) - len(rewards),
            "response_length_mean": sum(row["response_length"] for row in rows) / max(1, len(rows)),
            "truncated_share": sum(row["status"] == "truncated" for row in rows) / max(1, len(rows)),
        }
    return {"version": version, "done": done, "sets": results, "seconds": time.perf_counter() - started}


async def _evaluate_set(ctx: IterationContext, held_out: EvalSet, version: int) -> list[dict[str, Any]]:
    engines = await ctx.runtime.engines(version)
    slots = asyncio.Semaphore(ctx.config.rollout.max_concurrency * ctx.config.engines.generating)
    s = held_out.sampling

    async def one(number: int, index: int) -> dict[str, Any]:
        row = ctx.runtime.held_out(held_out).rows[number]
        tokens = ctx.runtime.held_out(held_out).tokens_of(number)
        seed = derived_seed(ctx.config.run.seed, "evaluate", held_out.name, row.prompt_id, index)
        params = {
            **s.model_dump(exclude={"stop", "stop_token_ids"}),
            "stop": s.stop or None,
            "stop_token_ids": s.stop_token_ids or None,
            "no_stop_trim": True,
            "sampling_seed": seed,
        }
        async with slots:
            result = await engines.generate(
                tokens, params, rid=f"eval-{version}-{row.prompt_id}-{index}", session=None
            )
        values = {
            "set": held_out.name,
            "prompt_id": row.prompt_id,
            "index": index,
            "prompt": json.dumps(row.prompt, ensure_ascii=False),
            "label": None if row.label is None else json.dumps(row.label, ensure_ascii=False),
            "metadata": json.dumps(row.metadata, ensure_ascii=False) if row.metadata else None,
            "response": result.text,
            "response_length": len(result.output_ids),
            "status": {"stop": "completed", "length": "truncated", "abort": "aborted"}[result.finish],
            "version": version,
        }
        outcome = await ctx.runtime.score(values)
        done = outcome.kind == "done"
        values["reward"] = outcome.value["reward"] if done else None
        values["scoring"] = "scored" if done else ("timed_out" if outcome.kind == "timed_out" else "failed")
        return {name: values[name] for name in schema.schema("evaluations").names}

    count = len(ctx.runtime.held_out(held_out).rows)
    jobs = [one(number, index) for number in range(count) for index in range(held_out.samples_per_prompt)]
    return list(await asyncio.gather(*jobs))
