"""filter: decide which groups are trained on, compute their advantages, and fix the batch.

Reads prompts, rollout parts and reward parts; writes verdicts.parquet (every drawn group, with reasons) and
batch.parquet (kept samples in drawing order, each with the step that will train it). Groups are judged one by one but
taken in drawing order, so the batch does not depend on which finished first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from prefect import task

from millrace.connectors.storage.parts import list_parts, read_parts
from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.task_records import FilterRecord
from millrace.core.errors import BudgetError
from millrace.core.group_filters import GroupSample, Judgement, judge_group
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point


@dataclass
class _Group:
    """A drawn group and what is known of its samples' scores."""

    group_id: str
    prompt_id: str
    ordinal: int
    rewards: dict[str, dict[str, Any]] = field(default_factory=dict)  # by sample id
    judgement: Judgement | None = None


@task(name="filter", retries=2, retry_delay_seconds=1)
async def filter_groups(ctx: IterationContext) -> FilterRecord:
    """Judge groups as their scores land, release others for dropped ones, then write verdicts and batch."""
    assert ctx.stream is not None
    need = ctx.config.rollout.prompts
    groups = await asyncio.to_thread(_read_groups, ctx)
    by_id = {group.group_id: group for group in groups}
    ctx.stream.add_listed("rewards", await asyncio.to_thread(list_parts, ctx.folder, "rewards"))
    read: set[str] = set()
    while True:
        revision = ctx.stream.revision
        for path in [p for p in ctx.stream.parts("rewards") if p not in read]:
            table = await asyncio.to_thread(ctx.folder.read_table, path, "rewards")
            _note(by_id, table.to_pylist())
            read.add(path)
        _judge(ctx, groups)
        released = min(len(groups), need + sum(_dropped(g) for g in groups[: ctx.stream.released]))
        if released > ctx.stream.released:
            await ctx.stream.release(released)
            continue
        if all(group.judgement for group in groups[:released]):
            break
        await ctx.stream.wait(revision)
    await ctx.stream.settle()
    kept = _keep(ctx, groups[:released], need)
    record = await asyncio.to_thread(_write, ctx, groups, kept)
    await kill_point(ctx.index, "filter", "in")
    return record


def _read_groups(ctx: IterationContext) -> list[_Group]:
    columns = ["group_id", "prompt_id", "ordinal"]
    rows = ctx.folder.read_table("prompts.parquet", "prompts", columns=columns).sort_by("ordinal").to_pylist()
    return [_Group(**row) for row in rows]


def _note(by_id: dict[str, _Group], rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        by_id[row["group_id"]].rewards[row["sample_id"]] = row


def _judge(ctx: IterationContext, groups: list[_Group]) -> None:
    n = ctx.config.rollout.samples_per_prompt
    for group in groups:
        if group.judgement is None and len(group.rewards) == n:
            samples = [
                GroupSample(sid, group.rewards[sid]["reward"], group.rewards[sid]["scoring"])
                for sid in (sample_id(group.group_id, index) for index in range(n))
            ]
            group.judgement = judge_group(samples, ctx.config.filter, ctx.config.algorithm)


def _dropped(group: _Group) -> bool:
    return group.judgement is not None and not group.judgement.keep


def _keep(ctx: IterationContext, groups: list[_Group], need: int) -> list[_Group]:
    """The groups that fill the batch, in drawing order; zero-variance ones stand in where the reserve did not suffice."""
    kept = [group for group in groups if group.judgement and group.judgement.keep][:need]
    missing = need - len(kept)
    if not missing:
        return kept
    if ctx.config.filter.when_insufficient == "keep":
        harmless = [g for g in groups if g.judgement and not g.judgement.keep and g.judgement.usable][
            :missing
        ]
        kept = sorted([*kept, *harmless], key=lambda group: group.ordinal)
        for group in harmless:
            group.judgement = Judgement(True, f"kept though {group.judgement.reason}", True)  # type: ignore[union-attr]
    if len(kept) < need:
        reasons: dict[str, int] = {}
        for group in groups:
            if group.judgement and not group.judgement.keep:
                reasons[group.judgement.reason] = reasons.get(group.judgement.reason, 0) + 1
        raise BudgetError(
            f"iteration {ctx.index}: only {len(kept)} of {need} groups passed the filter out of {len(groups)} generated; "
            f"dropped: {reasons}. Raise filter.refill_factor (now {ctx.config.filter.refill_factor:g}), set "
            "filter.when_insufficient=keep, or mend what fails. What finished is kept."
        )
    return kept


def _write(ctx: IterationContext, groups: list[_Group], kept: list[_Group]) -> FilterRecord:
    """Write verdicts of all drawn groups and the batch; returns counts."""
    steps = _steps(ctx, kept)
    counts: dict[str, int] = {}
    verdicts: list[dict[str, Any]] = []
    chosen = {group.group_id for group in kept}
    for group in groups:
        for index in range(ctx.config.rollout.samples_per_prompt):
            sid = sample_id(group.group_id, index)
            verdict, reason = _verdict(group, group.group_id in chosen, sid)
            label = verdict if reason is None else f"{verdict}: {reason}"
            counts[label] = counts.get(label, 0) + 1
            verdicts.append(
                {
                    "sample_id": sid,
                    "group_id": group.group_id,
                    "prompt_id": group.prompt_id,
                    "verdict": verdict,
                    "reason": reason,
                    "train_step": steps.get(sid) if verdict == "kept" else None,
                }
            )
    table = pa.Table.from_pylist(verdicts, schema=schema.schema("verdicts"))
    entries = [ctx.folder.write_table("verdicts.parquet", table, "verdicts")]
    entries.append(ctx.folder.write_table("batch.parquet", _batch(ctx, kept, steps), "batch"))
    return {
        "files": [entry.record() for entry in entries],
        "verdicts": counts,
        "groups_kept": len(kept),
        "groups_dropped": sum(_dropped(group) for group in groups),
        "groups_returned": sum(group.judgement is None for group in groups),
        "groups_zero_variance": sum(bool(g.judgement and g.judgement.zero_variance) for g in groups),
    }


def _verdict(group: _Group, chosen: bool, sid: str) -> tuple[str, str | None]:
    if group.judgement is None:
        return "returned", None
    if not chosen:
        return "dropped", group.judgement.reason
    if group.rewards[sid]["scoring"] != "scored":
        return "dropped", f"not scored: {group.rewards[sid]['scoring']}"
    return "kept", group.judgement.reason or None


def _steps(ctx: IterationContext, kept: list[_Group]) -> dict[str, int]:
    """Weight version that each kept sample's step makes: samples in drawing order, cut into global batches."""
    ids = [
        sample_id(group.group_id, i) for group in kept for i in range(ctx.config.rollout.samples_per_prompt)
    ]
    return {sid: ctx.version_before + 1 + at // ctx.config.global_batch for at, sid in enumerate(ids)}


def _batch(ctx: IterationContext, kept: list[_Group], steps: dict[str, int]) -> pa.Table:
    """The kept samples' rollouts with reward, advantage and step, in drawing order."""
    import torch

    from millrace.core.algorithms.advantages import sample_advantages
    from millrace.core.algorithms.schedule import shape_rewards

    rollouts = read_parts(ctx.folder, "rollouts", "rollouts")
    order = {sid: at for at, sid in enumerate(rollouts.column("sample_id").to_pylist())}
    scores = [
        group.rewards[sid]
        for group in kept
        for sid in (sample_id(group.group_id, i) for i in range(ctx.config.rollout.samples_per_prompt))
        if group.rewards[sid]["scoring"] == "scored"
    ]
    numbers = {group.group_id: at for at, group in enumerate(kept)}
    table = rollouts.take([order[row["sample_id"]] for row in scores])
    config = ctx.config.algorithm
    rewards = shape_rewards(
        torch.tensor([row["reward"] for row in scores], dtype=torch.float64),
        torch.tensor(table.column("response_length").to_pylist()),
        torch.tensor([status == "truncated" for status in table.column("status").to_pylist()]),
        config,
        budget=ctx.config.rollout.sampling.max_new_tokens,
    )
    advantages = sample_advantages(
        rewards, torch.tensor([numbers[row["group_id"]] for row in scores]), config
    )
    added = {
        "reward": [row["reward"] for row in scores],
        "reward_parts": [row["reward_parts"] for row in scores],
        "scoring": [row["scoring"] for row in scores],
        "verdict": ["kept"] * len(scores),
        "advantage": [None] * len(scores) if advantages is None else advantages.tolist(),
        "train_step": [steps[row["sample_id"]] for row in scores],
    }
    for name, values in added.items():
        table = table.append_column(schema.BATCH.field(name), pa.array(values, schema.BATCH.field(name).type))
    return table.select(schema.BATCH.names).cast(schema.schema("batch"))
