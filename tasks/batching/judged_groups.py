"""Judges the groups of an iteration one by one as their scores land.

Owns the rows read from parts and each group's verdict, in the order in which they became known. Does not know when there are
enough. A verdict depends only on stored rows: a start after a kill judges every group again, with the same verdicts.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millrace.connectors.storage.iteration_files import way_out
from millrace.connectors.storage.parts import list_parts
from millrace.core.config.filter import Filter
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.sample import Scorable, ScoredSample, columns
from millrace.core.hooks.group_filters import GroupSample, judge_group
from millrace.core.rewards.scoring import sample_input
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.scoring.scored_group import ScoredGroup
from millrace.tasks.stream import Kind


class Judging:
    """Reads parts as they land and judges complete groups."""

    def __init__(self, ctx: IterationContext) -> None:
        self.groups: list[ScoredGroup] = []
        self.parts: list[str] = []  # parts of rewards that were read
        self.whole: dict[str, int] = {}  # judged groups, with the number of groups judged before each
        self._ctx = ctx
        self._by_id: dict[str, ScoredGroup] = {}
        self._wanted = _columns_read(ctx.config.filter)
        self._budget = _budget(ctx)
        self._read: set[str] = set()
        self._waiting: list[ScoredSample] = []  # scores of groups that are not known yet

    async def open(self) -> None:
        """List the parts of an earlier attempt."""
        self._ctx.stream.add_listed("rewards", await self._listed("rewards"))
        # listed after the rewards, since a scored sample was generated before
        if self._wanted or self._ctx.shards:
            self._ctx.stream.add_listed("rollouts", await self._listed("rollouts"))

    def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Add groups, in the order in which they fill the batch."""
        self.groups = sorted([*self.groups, *groups], key=lambda group: group.place)
        self._by_id |= {group.group_id: group for group in groups}

    async def read(self) -> None:
        """Read the parts that have landed since."""
        ctx = self._ctx
        for path in [path for path in ctx.stream.parts("rewards") if path not in self._read]:
            table = await asyncio.to_thread(ctx.folder.read_table, path, "rewards")
            self._waiting += (ScoredSample(**row) for row in table.to_pylist())
            self._read.add(path)
            self.parts.append(path)
        known, self._waiting = self._waiting, []
        for score in known:
            if score.group_id in self._by_id:
                self._by_id[score.group_id].scores[score.sample_id] = score
            else:
                self._waiting.append(score)
        for path in [
            path for path in ctx.stream.parts("rollouts") if self._wanted and path not in self._read
        ]:
            table = await asyncio.to_thread(ctx.folder.read_table, path, "rollouts", columns=self._wanted)
            self._add_made(table.to_pylist())
            self._read.add(path)

    def judge(self, groups: Iterable[ScoredGroup]) -> None:
        """Judge the complete ones of these groups. Raises BudgetError if the user's filter failed on too many."""
        for group in groups:
            if group.judgement is None:
                rollouts = [
                    group.rollout(index) for index in range(self._ctx.config.rollout.samples_per_prompt)
                ]
                if all(rollouts):
                    samples = [
                        _group_sample(scores, group.made if self._wanted else None) for scores in rollouts
                    ]
                    group.judgement = judge_group(
                        samples, self._ctx.config.filter, self._ctx.config.algorithm
                    )
                    group.made.clear()
                    if group.judgement.kind == "filter_failed":
                        self._budget.add(group.judgement.reason, group.group_id)
            if group.judgement is not None:
                self.whole.setdefault(group.group_id, len(self.whole))
        self._budget.check()

    def _add_made(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            group = self._by_id.get(row["group_id"])
            if group is not None and group.judgement is None:
                group.made[row["sample_id"]] = row

    async def _listed(self, kind: Kind) -> list[str]:
        listed = await asyncio.to_thread(list_parts, self._ctx.folder, kind)
        return self._ctx.shards.counted(kind, listed) if self._ctx.shards else listed


def _columns_read(filter: Filter) -> list[str]:
    """The columns of rollouts that the filters read; none if rewards alone decide."""
    if filter.group_filter:
        return ["sample_id", "group_id", *columns(Scorable)]
    if filter.max_truncated_share is None and filter.max_mean_response_tokens is None:
        return []
    return ["sample_id", "group_id", "response_length", "status"]


def _budget(ctx: IterationContext) -> FailureBudget:
    config = ctx.config
    function = config.filter.group_filter.function if config.filter.group_filter else ""
    return FailureBudget(
        "filter.max_failed_share",
        config.filter.max_failed_share,
        config.rollout.prompts,
        what=f"could not be judged by filter.group_filter.function = {function}",
        where=f"iteration {iteration_number(ctx.index)}",
        remedy="correct the function, or raise the share, and start the same command again: the iteration's groups are judged "
        f"again. Or {way_out(ctx.run_folder, ctx.index)}",
        unit="group",
    )


def _group_sample(scores: Sequence[ScoredSample], made: Mapping[str, dict[str, Any]] | None) -> GroupSample:
    """A rollout for filters: its reward is the mean of its samples' rewards, None if a score is missing.

    made: rows of the rollouts, by sample id; None if the filters read none.
    """
    lacking = next((score for score in scores if score.reward is None), None)
    rows = [made[score.sample_id] for score in scores] if made is not None else []
    parts: dict[str, list[float]] = {}
    for name, value in (part for score in scores for part in score.reward_parts):
        parts.setdefault(name, []).append(value)
    sample = GroupSample(
        scores[0].sample_id,
        None if lacking else sum(map(reward_of, scores)) / len(scores),
        lacking.scoring if lacking else "scored",
        response_length=sum(row["response_length"] for row in rows),
        truncated=any(row["status"] == "truncated" for row in rows),
        parts={name: sum(values) / len(values) for name, values in parts.items()},
    )
    return replace(sample, input=sample_input(rows[0])) if rows and "prompt" in rows[0] else sample


def reward_of(score: ScoredSample) -> float:
    """The reward of a scored sample."""
    assert score.reward is not None, "a scored sample has a reward"
    return score.reward
