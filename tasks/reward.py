"""reward: score samples as their parts land, in worker processes that can be killed.

Reads rollout parts; writes one reward part for each. A sample whose scoring failed or timed out has no reward and
says why: that is not a zero.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pyarrow as pa
from prefect import task

from millrace.connectors.storage.parts import list_parts, read_parts, write_part
from millrace.core.contracts import schema
from millrace.core.contracts.task_records import RewardRecord
from millrace.core.errors import BudgetError
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point

COLUMNS = [
    "sample_id",
    "group_id",
    "prompt",
    "label",
    "metadata",
    "response",
    "response_length",
    "status",
    "reason",
]


@task(name="reward", retries=2, retry_delay_seconds=1)
async def reward(ctx: IterationContext) -> RewardRecord:
    """Score until the filter has settled; the record counts outcomes and seconds."""
    assert ctx.stream is not None
    scored = await asyncio.to_thread(read_parts, ctx.folder, "rewards", "rewards", ignore_incomplete=True)
    done: set[str] = set(scored.column("sample_id").to_pylist())
    counts = {"scored": 0, "failed": 0, "timed_out": 0, "skipped": 0}
    for outcome in scored.column("scoring").to_pylist():
        counts[outcome] += 1
    ctx.stream.found("rollouts", await asyncio.to_thread(list_parts, ctx.folder, "rollouts"))
    parts: set[str] = set()
    busy = 0.0
    while True:
        revision = ctx.stream.revision
        fresh = [path for path in ctx.stream.parts("rollouts") if path not in parts]
        for path in fresh:
            started = time.perf_counter()
            table = await asyncio.to_thread(ctx.folder.read_table, path, "rollouts", columns=COLUMNS)
            rows = [row for row in table.to_pylist() if row["sample_id"] not in done]
            results = await asyncio.gather(*(_score(ctx, row) for row in rows))
            await _write(ctx, results)
            for result in results:
                done.add(result["sample_id"])
                counts[result["scoring"]] += 1
            _check_budget(ctx, counts, results)
            parts.add(path)
            busy += time.perf_counter() - started
        if ctx.stream.settled:
            return {
                "scored": counts["scored"],
                "failed": counts["failed"],
                "timed_out": counts["timed_out"],
                "skipped": counts["skipped"],
                "seconds": busy,
            }
        await ctx.stream.wait(revision)


async def _score(ctx: IterationContext, row: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "sample_id": row["sample_id"],
        "group_id": row["group_id"],
        "reward": None,
        "reward_parts": [],
        "scoring": "skipped",
        "reason": row["reason"],
        "scoring_s": 0.0,
    }
    if row["status"] in ("failed", "aborted"):
        return result
    started = time.perf_counter()
    outcome = await ctx.runtime.score(row)
    result["scoring_s"] = time.perf_counter() - started
    if outcome.kind == "done":
        result.update(
            scoring="scored",
            reward=outcome.value["reward"],
            reward_parts=list(outcome.value["parts"].items()),
        )
    else:
        result.update(scoring="timed_out" if outcome.kind == "timed_out" else "failed", reason=outcome.reason)
    return result


def _check_budget(ctx: IterationContext, counts: dict[str, int], results: list[dict[str, Any]]) -> None:
    failed = counts["failed"] + counts["timed_out"]
    budget = ctx.config.reward.max_failed_share * ctx.config.samples_per_iteration
    if failed > budget:
        reasons = [r["reason"] for r in results if r["scoring"] in ("failed", "timed_out")]
        raise BudgetError(
            f"iteration {ctx.index}: scoring of {failed} samples failed, more than reward.max_failed_share = "
            f"{ctx.config.reward.max_failed_share:g} allows ({budget:.0f}); the last reason: {reasons[-1] if reasons else 'in an earlier attempt'}. "
            f"What finished is kept: mend {ctx.config.reward.function} or the data and start the run again."
        )


async def _write(ctx: IterationContext, results: list[dict[str, Any]]) -> None:
    if not results:
        return
    table = pa.Table.from_pylist(results, schema=schema.schema("rewards"))
    entry = await asyncio.to_thread(write_part, ctx.folder, "rewards", table, "rewards")
    await kill_point(ctx.index, "reward", "in")
    assert ctx.stream is not None
    await ctx.stream.land("rewards", entry.path)
