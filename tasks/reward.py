"""reward: score samples as their parts land, in worker processes that can be killed.

Reads rollout parts; writes one reward part for each. A sample whose scoring failed or timed out has no reward and
says why: that is not a zero.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from prefect import task

from millrace.connectors.storage.parts import list_parts, read_parts, write_part
from millrace.core.contracts import schema
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.sample import ScoredSample, Scoring, Unscored, columns
from millrace.core.contracts.task_records import RewardRecord
from millrace.core.errors import BudgetError
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.samples.scoring import score


@task(name="reward", retries=2, retry_delay_seconds=1)
async def reward(ctx: IterationContext) -> RewardRecord:
    """Score until the filter has settled; the record counts outcomes and seconds."""
    assert ctx.stream is not None
    stored = await asyncio.to_thread(read_parts, ctx.folder, "rewards", "rewards", ignore_incomplete=True)
    await asyncio.to_thread(ctx.start_parts, "rewards")
    done: set[str] = set(stored.column("sample_id").to_pylist())
    counts: dict[Scoring, int] = {"scored": 0, "failed": 0, "timed_out": 0, "skipped": 0}
    for outcome in stored.column("scoring").to_pylist():
        counts[outcome] += 1
    ctx.stream.add_listed("rollouts", await asyncio.to_thread(list_parts, ctx.folder, "rollouts"))
    parts: set[str] = set()
    busy = 0.0
    while True:
        revision = ctx.stream.revision
        for path in [path for path in ctx.stream.parts("rollouts") if path not in parts]:
            started = time.perf_counter()
            rows = await asyncio.to_thread(_read_unscored, ctx, path)
            scored = await asyncio.gather(*(_score(ctx, row) for row in rows if row["sample_id"] not in done))
            for sample in scored:
                counts[sample.scoring] += 1
            _check_budget(ctx, counts, scored)  # before they are stored: what is stored is not scored again
            await _write(ctx, scored)
            done.update(sample.sample_id for sample in scored)
            parts.add(path)
            busy += time.perf_counter() - started
        if ctx.stream.settled:
            return {
                "scored": counts["scored"],
                "failed": counts["failed"],
                "timed_out": counts["timed_out"],
                "skipped": counts["skipped"],
                "seconds": busy,
                "files": ctx.parts["rewards"],
            }
        await ctx.stream.wait(revision)


def _read_unscored(ctx: IterationContext, path: str) -> list[Unscored]:
    rows: list[Unscored] = ctx.folder.read_table(path, "rollouts", columns=columns(Unscored)).to_pylist()
    return rows


async def _score(ctx: IterationContext, row: Unscored) -> ScoredSample:
    result = await score(ctx.runtime, row)
    return ScoredSample(
        sample_id=row["sample_id"],
        group_id=row["group_id"],
        reward=result.reward,
        reward_parts=result.parts,
        scoring=result.scoring,
        # one that was scored, or skipped because its generation failed, has the reason of its generation, if any
        reason=row["reason"] if result.reason is None else result.reason,
        scoring_s=result.seconds,
    )


def _check_budget(ctx: IterationContext, counts: dict[Scoring, int], scored: Sequence[ScoredSample]) -> None:
    failed = counts["failed"] + counts["timed_out"]
    share = ctx.config.reward.max_failed_share
    allowed = share * ctx.config.samples_per_iteration
    if failed > allowed:
        reasons = [sample.reason for sample in scored if sample.scoring in ("failed", "timed_out")]
        last = reasons[-1] if reasons else "in an earlier attempt"
        raise BudgetError(
            f"scoring of {failed} samples failed, more than reward.max_failed_share = {share:g} allows "
            f"({allowed:.0f}); the last reason: {last}",
            where=f"iteration {iteration_number(ctx.index)}",
            remedy=f"fix {ctx.config.reward.function} or the data, or raise reward.max_failed_share, and start the run again; "
            "what finished is kept",
        )


async def _write(ctx: IterationContext, scored: Sequence[ScoredSample]) -> None:
    if not scored:
        return
    table = schema.to_table(scored, "rewards")
    entry = await asyncio.to_thread(write_part, ctx.folder, "rewards", table, "rewards")
    ctx.parts["rewards"].append(entry.record())
    await kill_point(ctx.index, "reward", "in")
    assert ctx.stream is not None
    await ctx.stream.land("rewards", entry.path)
