"""reward: score samples as their parts land, in worker processes that can be killed, and ask a served teacher about them.

Reads rollout parts; writes one reward part for each. A sample whose scoring failed or timed out has no reward but a reason:
that is not a zero. The same holds for a sample that the teacher gave no answer about. It is scored again at the next start, as
long as the iteration's batch is not fixed.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from prefect import task

from millrace.connectors.storage.iteration_files import IterationFiles, record_path, way_out
from millrace.connectors.storage.parts import list_parts, write_part
from millrace.connectors.storage.run_folder import CUT
from millrace.core.contracts import schema
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.sample import AskedAbout, ScoredSample, Scoring, Unscored, columns
from millrace.core.contracts.task_records import RewardRecord
from millrace.core.errors import CorruptFileError
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help
from millrace.tasks.scoring.scoring import Score, score, score_group, scored_as_one, scored_by_group
from millrace.tasks.scoring.scoring_batches import ScoringUnits
from millrace.tasks.scoring.teacher_scores import Taught, ask_teacher

OUTCOME = ["sample_id", "scoring", "reason"]  # columns
UNSCORED: tuple[Scoring, ...] = ("failed", "timed_out")
# tasks that run before the batch is known
BEFORE_BATCH = {"evaluate_before", "sample_prompts", "rollout", "reward"}
log = logging.getLogger(__name__)


@task(name="reward", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def reward(ctx: IterationContext) -> RewardRecord:
    """Score until the filter has settled; the record counts outcomes and seconds.

    Raises BudgetError if too many could not be scored. Scores and reasons are stored by then.
    Samples of deferred groups keep their scores from the previous iteration.
    """
    return await (ctx.shards.reward() if ctx.shards else score_landing(ctx))


async def score_landing(ctx: IterationContext, groups: frozenset[str] | None = None) -> RewardRecord:
    """Score samples as they land. groups: the groups whose samples this process scores; None: all."""
    stored = _of_groups(await asyncio.to_thread(ctx.stored_parts, "rewards", [*OUTCOME, "group_id"]), groups)
    await asyncio.to_thread(ctx.start_parts, "rewards")
    done: set[str] = set(stored.column("sample_id").to_pylist())
    counts: Counter[Scoring] = Counter(stored.column("scoring").to_pylist())
    budget = reward_budget(ctx, stored.select(OUTCOME).to_pylist())
    budget.check()
    listed = await asyncio.to_thread(ctx.listed_parts, "rollouts")
    if listed:
        # deferred groups may hold samples that were scored before
        await ctx.stream.until_joined()
    ctx.stream.add_listed("rollouts", listed)
    parts: set[str] = set()
    units = ScoringUnits(ctx.config.rollout.samples_per_prompt, lambda row: _by_group(ctx, row))
    busy = 0.0
    while True:
        revision = ctx.stream.revision
        for path in [path for path in ctx.stream.parts("rollouts") if path not in parts]:
            started = time.perf_counter()
            rows = await asyncio.to_thread(_read_unscored, ctx, path, groups)
            carried = _carried(ctx, rows, done)
            done.update(sample.sample_id for sample in carried)
            scored = [*carried, *await _score_all(ctx, units.add(rows, done), budget)]
            await _write(ctx, scored)
            budget.check()
            counts.update(sample.scoring for sample in scored)
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


async def take_back_failures(ctx: IterationContext) -> None:
    """Before the streaming tasks: mark failed and timed-out samples for another scoring, unless the batch is fixed.

    A group that one call scores is scored again as a whole: a call for some of its samples would compare these alone.
    The parts that hold them are replaced by parts without them. The records of rollout and reward go first: with other
    scores the filter may ask for more groups.
    """
    await asyncio.to_thread(_take_back, ctx)


def _take_back(ctx: IterationContext) -> None:
    recorded = IterationFiles(ctx.run_folder, ctx.index).recorded_tasks()
    if not set(recorded) <= BEFORE_BATCH or ctx.folder.exists(CUT):
        # the batch is fixed, or at least its groups
        return
    whole: dict[str, list[ScoredSample]] = {}
    for path in list_parts(ctx.folder, "rewards"):
        # the task removes a broken part
        with contextlib.suppress(CorruptFileError):
            table = ctx.folder.read_table(path, "rewards")
            whole[path] = [ScoredSample(**row) for row in table.to_pylist()]
    failed = {row.group_id for rows in whole.values() for row in rows if row.scoring in UNSCORED}
    if not failed:
        return
    as_one = scored_as_one(ctx.runtime, _rows_of_parts(ctx), failed)

    def again(row: ScoredSample) -> bool:
        return row.scoring in UNSCORED or row.group_id in as_one

    # a part with a failure is removed last: the next start finds the group by it
    changed = sorted(
        (path for path, rows in whole.items() if any(map(again, rows))),
        key=lambda path: any(row.scoring in UNSCORED for row in whole[path]),
    )
    for task_name in ("rollout", "reward"):
        if task_name in recorded:
            ctx.folder.remove(record_path(task_name))
    kept = {row.sample_id for path, rows in whole.items() if path not in changed for row in rows}
    for path in changed:
        good = [row for row in whole[path] if not again(row) and row.sample_id not in kept]
        if good:
            write_part(ctx.folder, "rewards", schema.to_table(good, "rewards"), "rewards")
        ctx.folder.remove(path)
    log.warning(
        "iteration %d: %d samples could not be scored and are scored again%s",
        iteration_number(ctx.index),
        sum(row.scoring in UNSCORED for rows in whole.values() for row in rows),
        ", with the others of their prompts if one call scores them together" if as_one else "",
    )


def _rows_of_parts(ctx: IterationContext) -> list[Unscored]:
    """All samples that the iteration generated, with the columns that a reward reads."""
    rows: list[Unscored] = []
    for path in list_parts(ctx.folder, "rollouts"):
        # the rollout task removes a broken part
        with contextlib.suppress(CorruptFileError):
            rows += _read_unscored(ctx, path)
    return rows


def _carried(ctx: IterationContext, rows: Sequence[Unscored], done: set[str]) -> list[ScoredSample]:
    """Scores that these samples got in the iteration that deferred them."""
    scores = ctx.stream.joined.scores if ctx.stream.joined else {}
    return [
        scores[row["sample_id"]]
        for row in rows
        if row["sample_id"] in scores and row["sample_id"] not in done
    ]


def _read_unscored(ctx: IterationContext, path: str, groups: frozenset[str] | None = None) -> list[Unscored]:
    wanted = columns(Unscored if ctx.runtime.teacher is None else AskedAbout)
    table = ctx.folder.read_table(path, "rollouts", columns=wanted)
    rows: list[Unscored] = _of_groups(table, groups).to_pylist()
    return rows


def _of_groups(table: pa.Table, groups: frozenset[str] | None) -> pa.Table:
    """The rows of these groups; None: all rows."""
    if groups is None:
        return table
    return table.filter(pc.is_in(table.column("group_id"), pa.array(sorted(groups), pa.string())))


def _by_group(ctx: IterationContext, row: Unscored) -> bool:
    return scored_by_group(ctx.runtime, row, ctx.runtime.scoring.of_sources.get(row["source"]))


async def _score(ctx: IterationContext, rows: Sequence[Unscored]) -> list[ScoredSample]:
    """The scores of one unit, and the teacher's answers."""
    results, taught = await asyncio.gather(
        _results(ctx, rows),
        asyncio.gather(*(ask_teacher(ctx.runtime.teacher, ctx.runtime.hints, row) for row in rows)),
    )
    return [_row(*one) for one in zip(rows, results, taught, strict=True)]


async def _results(ctx: IterationContext, rows: Sequence[Unscored]) -> list[Score]:
    own = ctx.runtime.scoring.of_sources.get(rows[0]["source"])
    if _by_group(ctx, rows[0]):
        return await score_group(ctx.runtime, rows, own)
    return [await score(ctx.runtime, row, own) for row in rows]


def _row(row: Unscored, result: Score, taught: Taught) -> ScoredSample:
    if taught.reason is not None and result.scoring == "scored":
        result = Score("failed", reason=taught.reason, seconds=result.seconds)
    return ScoredSample(
        sample_id=row["sample_id"],
        group_id=row["group_id"],
        reward=result.reward,
        reward_parts=result.parts,
        scoring=result.scoring,
        # a sample that was scored, or skipped because its generation failed, has the reason of its generation, if any
        reason=row["reason"] if result.reason is None else result.reason,
        scoring_s=result.seconds,
        samples=row["samples"],
        role=row["role"],
        teacher_logprobs=taught.logprobs,
        teacher_s=taught.seconds,
        teacher_top_tokens=taught.top_tokens,
        teacher_top_logprobs=taught.top_logprobs,
        teacher_hint=taught.hint,
        reward_texts=result.texts,
        answer=result.answer,
    )


async def _score_all(
    ctx: IterationContext, units: Sequence[Sequence[Unscored]], budget: FailureBudget
) -> list[ScoredSample]:
    """The units' scores, in order; once the budget is spent, only of units that are scored by then."""
    running = [asyncio.create_task(_score(ctx, unit)) for unit in units]
    try:
        for finished in asyncio.as_completed(running):
            for sample in await finished:
                _count(budget, sample.sample_id, sample.scoring, sample.reason)
            if budget.spent:
                break
        return [sample for task in running if task.done() for sample in task.result()]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _count(budget: FailureBudget, sample_id: str, scoring: Scoring, reason: str | None) -> None:
    if scoring in UNSCORED:
        budget.add(reason or scoring, sample_id)


def reward_budget(ctx: IterationContext, stored: Iterable[Mapping[str, Any]] = ()) -> FailureBudget:
    """Counts samples that could not be scored, starting with the stored ones. stored: with the columns OUTCOME."""
    config = ctx.config
    cause = config.reward.function
    if config.algorithm.teacher_server:
        cause += ", the server of algorithm.teacher_server"
    budget = FailureBudget(
        "reward.max_failed_share",
        config.reward.max_failed_share,
        config.samples_per_iteration,
        what="could not be scored",
        where=f"iteration {iteration_number(ctx.index)}",
        remedy=f"correct {cause} or the data, or raise the share (or reward.timeout_s where it is short), and "
        "start the same command again: those samples are scored again, scores that were given are kept. Or "
        f"{way_out(ctx.run_folder, ctx.index)}, which scores all of its samples again",
        also=partial(ctx.note_failure, "reward"),
    )
    for row in stored:
        _count(budget, **row)
    return budget


async def _write(ctx: IterationContext, scored: Sequence[ScoredSample]) -> None:
    if not scored:
        return
    table = schema.to_table(scored, "rewards")
    entry = await asyncio.to_thread(write_part, ctx.folder, "rewards", table, "rewards")
    ctx.parts["rewards"].append(entry.record())
    await kill_point(ctx.index, "reward", "in")
    await ctx.announce("rewards", entry)
