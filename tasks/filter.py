"""filter: decide which groups are trained on, credit their samples, and fix the batch.

Reads prompts, rollout parts and reward parts; writes verdicts.parquet (every drawn group, with reasons) and
batch.parquet (kept samples in drawing order, each with its shaped reward, its advantage and the step that will train it).
Groups that the iteration reuses were judged before: they join the batch with their stored rewards, and get credit and a
step like the others.
pipeline.select decides which groups fill the batch: the first in drawing order, so that timing has no effect; or the first to
finish, which cut.json then records.
Shaping and advantages run in a worker process: neither torch nor the user's functions of tensors belong in the driver.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from prefect import task

from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.iteration_files import way_out
from millrace.core.accounts.lineage import NOTHING_GENERATED
from millrace.core.algorithms.credit import SampleCredit, load_libraries
from millrace.core.contracts import schema
from millrace.core.contracts.failures import Failures
from millrace.core.contracts.ids import iteration_number, rollout_of, sample_id
from millrace.core.contracts.sample import JudgedSample, Verdict
from millrace.core.contracts.task_records import FilterRecord
from millrace.core.errors import BudgetError
from millrace.core.hooks.group_filters import KINDS, Judgement
from millrace.tasks.batching.batch_selection import until_cut, until_filled
from millrace.tasks.batching.credited import (
    CREDIT_TIMEOUT_S,
    chunk_rows,
    credited,
    read_chosen,
    sample_ids,
)
from millrace.tasks.batching.deferred_groups import is_cut
from millrace.tasks.batching.judged_groups import Judging
from millrace.tasks.batching.kept_groups import (
    KeptGroups,
    batch_pieces,
    check_ages,
    with_reused,
)
from millrace.tasks.batching.reused_groups import REUSED, read_reused, reused_samples
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help
from millrace.tasks.scoring.scored_group import ScoredGroup


@task(name="filter", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def filter_groups(ctx: IterationContext) -> FilterRecord:
    """Judge groups as their scores land, release others for dropped ones, then write verdicts and batch."""
    worker = ctx.runtime.scoring.credit_worker
    loading = asyncio.create_task(worker.call(load_libraries, timeout_s=CREDIT_TIMEOUT_S))
    need = ctx.fresh_groups
    judging = Judging(ctx)
    await judging.open()
    judging.add(await asyncio.to_thread(_read_groups, ctx))
    if await asyncio.to_thread(is_cut, ctx):
        entries, groups = await until_cut(ctx, judging, need)
    else:
        entries, groups = [], await until_filled(ctx, judging, need)
    await ctx.stream.settle()
    chosen = _keep(ctx, groups, need)
    kept = await asyncio.to_thread(read_chosen, ctx, chosen)
    if ctx.reused:
        kept = with_reused(kept, await asyncio.to_thread(read_reused, ctx))
    await loading
    credit = await credited(ctx, kept)
    record = await asyncio.to_thread(_write, ctx, judging.groups, kept, credit)
    record["files"] += [entry.record() for entry in entries]
    await kill_point(ctx.index, "filter", "in")
    return record


def _read_groups(ctx: IterationContext) -> list[ScoredGroup]:
    columns = ["group_id", "prompt_id", "ordinal", "unusable"]
    return [_group(**row) for row in ctx.read_prompts(columns).to_pylist()]


def _group(unusable: str | None, **row: Any) -> ScoredGroup:
    """A drawn group; one whose row is unusable is dropped before anything is generated."""
    if unusable is None:
        return ScoredGroup(**row)
    return ScoredGroup(
        **row, judgement=Judgement(False, f"unusable row: {unusable}", False, kind="unusable_row")
    )


def _dropped(group: ScoredGroup) -> bool:
    return group.cut is None and group.judgement is not None and not group.judgement.keep


def _keep(ctx: IterationContext, groups: list[ScoredGroup], need: int) -> list[ScoredGroup]:
    """The groups that fill the batch, in drawing order; usable dropped ones are added if the reserve did not suffice."""
    kept = [group for group in groups if group.judgement and group.judgement.keep][:need]
    missing = need - len(kept)
    if not missing:
        return kept
    if ctx.config.filter.when_insufficient == "keep":
        harmless = [g for g in groups if g.judgement and not g.judgement.keep and g.judgement.usable][
            :missing
        ]
        kept = sorted([*kept, *harmless], key=lambda group: group.place)
        for group in harmless:
            assert group.judgement is not None
            group.judgement = replace(
                group.judgement, keep=True, reason=f"kept though {group.judgement.reason}"
            )
    if len(kept) < need:
        dropped = Failures()
        for group in groups:
            if group.judgement and not group.judgement.keep:
                dropped.add(group.judgement.reason, f"group {group.group_id}")
        raise BudgetError(
            f"only {len(kept)} of {need} groups passed the filter out of {len(groups)} generated, with filter.refill_factor = "
            f"{ctx.config.filter.refill_factor:g} and filter.when_insufficient = {ctx.config.filter.when_insufficient}; "
            f"dropped most often: {dropped.most_frequent()}{_failures(groups)}",
            where=f"iteration {iteration_number(ctx.index)}",
            remedy="set filter.when_insufficient=keep, or correct what fails, and start the same command again: failed samples "
            f"are scored again. Or {way_out(ctx.run_folder, ctx.index)}. A branch can raise filter.refill_factor",
        )
    return kept


def _write(
    ctx: IterationContext, groups: list[ScoredGroup], kept: KeptGroups, credit: SampleCredit
) -> FilterRecord:
    """Write verdicts of all drawn groups and the batch; returns counts."""
    steps = _steps(ctx, kept)
    counts: dict[str, int] = {}
    judged: list[JudgedSample] = []
    with_std = ctx.config.rollout.buffer is not None
    chosen = {group.group_id for group in kept.groups}
    for group in groups:
        for sid in sample_ids(ctx, group):
            verdict, dropped_by, reason = _verdict(group, group.group_id in chosen, sid, sid in steps)
            label = verdict if reason is None else f"{verdict}: {reason}"
            counts[label] = counts.get(label, 0) + 1
            judged.append(
                JudgedSample(
                    sample_id=sid,
                    group_id=group.group_id,
                    prompt_id=group.prompt_id,
                    verdict=verdict,
                    reason=reason,
                    train_step=steps.get(sid) if verdict == "kept" else None,
                    dropped_by=dropped_by,
                    group_reward=group.judgement.reward if group.judgement and not group.cut else None,
                    group_reward_std=group.judgement.reward_std if with_std and group.judgement else None,
                )
            )
    again = reused_samples(kept.reused.values(), steps)
    if again:
        counts[REUSED] = len(again)
    check_ages(ctx, kept)
    table = schema.to_table(judged + again, "verdicts")
    pieces = partial(batch_pieces, kept, credit, steps)
    write: list[Callable[[], FileEntry]] = [
        lambda: ctx.folder.write_table("verdicts.parquet", table, "verdicts"),
        lambda: ctx.folder.write_pieces("batch.parquet", pieces, "batch"),
    ]
    entries = in_threads(lambda file: file(), write)
    ctx.landed.forget()
    deferred = sum(group.cut == "deferred" for group in groups)
    record: FilterRecord = {
        "files": [entry.record() for entry in entries],
        "verdicts": counts,
        "groups_kept": len(kept.groups) - len(kept.reused),
        "groups_dropped": sum(_dropped(group) for group in groups),
        "groups_returned": sum(
            (group.cut or "returned") == "returned" for group in groups if group.cut or not group.judgement
        ),
        "groups_zero_variance": sum(
            bool(not g.cut and g.judgement and g.judgement.zero_variance) for g in groups
        ),
        "dropped_by_kind": {
            kind: sum(_dropped(g) and g.judgement is not None and g.judgement.kind == kind for g in groups)
            for kind in KINDS
        },
    }
    if ctx.eager:
        record["chunks"] = chunk_rows(ctx, kept)
    if deferred:
        record["groups_deferred"] = deferred
    return record


def _verdict(
    group: ScoredGroup, chosen: bool, sid: str, trained: bool
) -> tuple[Verdict, str | None, str | None]:
    """The verdict on a sample, what dropped it, and the reason."""
    if group.cut or group.judgement is None:
        return group.cut or "returned", None, None
    if not chosen:
        return "dropped", group.judgement.kind, group.judgement.reason
    scoring = group.scores[sid].scoring
    if scoring != "scored":
        return "dropped", "not_generated" if scoring == "skipped" else "not_scored", f"not scored: {scoring}"
    if not trained:
        return "dropped", NOTHING_GENERATED, "it generated nothing"
    return "kept", None, group.judgement.reason or None


def _steps(ctx: IterationContext, kept: KeptGroups) -> dict[str, int]:
    """Weight version that each scored sample's step makes, in the first pass: rollouts in drawing order, in global batches.

    The places of rollouts that were not scored stay empty. If that would leave a step without samples, the scored rollouts are
    cut into equal parts instead. Raises BudgetError if there are fewer of them than steps.
    """
    first, steps = ctx.version_before + 1, ctx.config.steps_per_pass
    scored = list(dict.fromkeys(rollout_of(score.sample_id) for score in kept.scores))
    if len(scored) < steps:
        raise BudgetError(
            f"only {len(scored)} samples were scored, for {steps} train steps{_failures(kept.groups)}",
            where=f"iteration {iteration_number(ctx.index)}",
            remedy="correct what fails, and start the same command again: failed samples are scored again. Or "
            + way_out(ctx.run_folder, ctx.index),
        )
    n = ctx.config.rollout.samples_per_prompt
    rollouts = (sample_id(group.group_id, index) for group in kept.groups for index in range(n))
    places = {rollout: at for at, rollout in enumerate(rollouts)}
    cut = {rollout: places[rollout] // ctx.config.global_batch for rollout in scored}
    if len(set(cut.values())) < steps:
        cut = {rollout: at * steps // len(scored) for at, rollout in enumerate(scored)}
    return {score.sample_id: first + cut[rollout_of(score.sample_id)] for score in kept.scores}


def _failures(groups: list[ScoredGroup]) -> str:
    """Why samples of these groups have no reward, as the rest of a sentence; empty if all have one."""
    found = Failures()
    for score in (score for group in groups for score in group.scores.values()):
        if score.scoring != "scored":
            found.add(score.reason or score.scoring, f"sample {score.sample_id}")
    return f"; not scored most often: {found.most_frequent()}" if found.total else ""
