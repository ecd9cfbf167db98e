"""The groups that an iteration trains, and the batch that they make.

Owns the order of the batch and its columns. Knows nothing of why a group was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from millrace.core.algorithms.credit import SampleCredit
from millrace.core.buffer.choice import spread
from millrace.core.contracts import schema
from millrace.core.contracts.sample import ScoredSample
from millrace.core.staleness import admissible
from millrace.tasks.context import IterationContext
from millrace.tasks.samples.reused_groups import Reuse
from millrace.tasks.samples.scored_group import ScoredGroup


@dataclass
class KeptGroups:
    """The groups that are trained on, in drawing order, and what is stored of their scored samples, row by row."""

    groups: list[ScoredGroup]
    rollouts: pa.Table
    scores: list[ScoredSample]
    reused: dict[str, Reuse] = field(
        default_factory=dict
    )  # those that an earlier iteration generated, by group


def with_reused(kept: KeptGroups, reused: list[Reuse]) -> KeptGroups:
    """The batch's groups in the order in which steps are cut: the reused ones at equal distances among the others."""
    fresh = len(kept.groups)
    groups = [*kept.groups, *(item.group for item in reused)]
    scores = [*kept.scores, *(score for item in reused for score in item.group.scores.values())]
    rows: dict[str, list[int]] = {}
    for at, score in enumerate(scores):
        rows.setdefault(score.group_id, []).append(at)
    ordered = [groups[at] for at in spread(fresh, len(reused))]
    order = [at for group in ordered for at in rows.get(group.group_id, ())]
    rollouts = pa.concat_tables([kept.rollouts, *(item.rollouts for item in reused)])
    by_group = {item.group.group_id: item for item in reused}
    return KeptGroups(ordered, rollouts.take(order), [scores[at] for at in order], by_group)


def batch_table(kept: KeptGroups, credit: SampleCredit, steps: dict[str, int]) -> pa.Table:
    """The scored samples' rollouts with reward, credit and step, in drawing order."""
    scores = kept.scores
    reuses = [kept.reused.get(score.group_id) for score in scores]
    added: dict[str, Sequence[object]] = {
        "reward": [score.reward for score in scores],
        "reward_parts": [score.reward_parts for score in scores],
        "scoring": [score.scoring for score in scores],
        "verdict": ["kept"] * len(scores),
        "shaped_reward": credit.shaped_rewards,
        "advantage": credit.advantages or [None] * len(scores),
        "train_step": [steps[score.sample_id] for score in scores],
        "teacher_logprobs": [score.teacher_logprobs for score in scores],
        "reused_from": [reuse.iteration if reuse else None for reuse in reuses],
        "uses": [reuse.uses if reuse else None for reuse in reuses],
        "teacher_top_tokens": [score.teacher_top_tokens for score in scores],
        "teacher_top_logprobs": [score.teacher_top_logprobs for score in scores],
    }
    table = kept.rollouts
    wanted = schema.schema("batch")
    for name, values in added.items():
        table = table.append_column(wanted.field(name), pa.array(values, wanted.field(name).type))
    return table.select(wanted.names).cast(wanted)


def check_ages(ctx: IterationContext, batch: pa.Table) -> None:
    """Assert that no token of a batch is older than pipeline.max_staleness, or than what its group was deferred under.

    Iterations open and groups are deferred so that this holds; nothing is dropped for its age.
    """
    fresh = batch.filter(pc.is_null(batch.column("reused_from")))
    steps, ahead = ctx.config.steps_per_iteration, ctx.runtime.prompts.ahead
    for origin, spans in zip(
        fresh.column("iteration").to_pylist(), fresh.column("policy_versions").to_pylist(), strict=True
    ):
        allowed = max(ctx.config.pipeline.staleness, ctx.index - origin + ahead.at(origin))
        oldest = min((span["version"] for span in spans), default=ctx.version_before)
        assert admissible(oldest, ctx.index, allowed, steps), (
            f"a token of version {oldest} in iteration {ctx.index}"
        )
