"""How well the policy does on each source, from the scores of committed iterations. Pure.

It is computed like the ledger that uses it: an iteration's state depends only on the iterations before it, so that a restarted
process, and a replay, draw the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from millrace.core.accounts.history import IterationHistory
from millrace.core.config.data import CurriculumStage, Levels, Pools, Source

# names of sources hold no such character
MARK = "@"


class SourcePlan(NamedTuple):
    """How a source is drawn from. `rows`: usable rows, of each level if it has levels."""

    weight: float
    rows: int | Mapping[int, int]
    levels: Levels | None = None
    pools: Pools | None = None

    def parts(self, name: str) -> dict[str, int]:
        """Rows of each part of the source, by the name of the part."""
        if isinstance(self.rows, int):
            return {name: self.rows}
        return {part_name(name, level): rows for level, rows in sorted(self.rows.items())}


def plan_of(source: Source, sizes: Mapping[int | None, int]) -> SourcePlan:
    """How a source is drawn from. `sizes`: usable rows by level; under None for a source without levels."""
    levels = {level: rows for level, rows in sizes.items() if level is not None}
    return SourcePlan(source.weight, levels or sizes[None], source.levels, source.pools)


def part_name(source: str, level: int | None) -> str:
    """The name under which the ledger draws from a source, or from one of its levels."""
    return source if level is None else f"{source}{MARK}{level}"


def source_and_level(part: str) -> tuple[str, int | None]:
    """The source that a part is of, and its level."""
    source, mark, level = part.partition(MARK)
    return source, int(level) if mark else None


@dataclass(frozen=True)
class Mastery:
    """The highest level reached of a source, and the scores of the groups on it since."""

    highest: int
    groups: int = 0
    total: float = 0.0

    def after(self, score: float, levels: Levels) -> Mastery:
        """The mastery after one more group of the highest level.

        The level rises when the mean of `levels.groups` scores is high enough; else they are forgotten and counting starts
        again, so that early failures do not hold a policy back (RLVE, arXiv:2511.07317, section 3).
        """
        groups, total = self.groups + 1, self.total + score
        if groups < levels.groups:
            return Mastery(self.highest, groups, total)
        rises = total / groups >= levels.raise_from and self.highest < levels.last
        return Mastery(self.highest + rises)


@dataclass(frozen=True)
class Standing:
    """The state that a draw depends on, besides the order of rows."""

    mastery: Mapping[str, Mastery] = field(default_factory=dict)  # by source with levels
    stage: int = 0
    iterations: int = 0  # iterations of this stage so far
    recent: tuple[float, ...] = ()  # last scores of this stage, as many as its end depends on


class CurriculumProgress:
    """The standing after each committed iteration, and the last scores of rows in pools."""

    def __init__(
        self, plans: Mapping[str, SourcePlan], stages: Sequence[CurriculumStage] = (), first: int = 0
    ) -> None:
        """first: the iteration from which on scores count."""
        self._levels = {name: plan.levels for name, plan in plans.items() if plan.levels}
        self._pooled = {name for name, plan in plans.items() if plan.pools}
        self._stages = list(stages)
        self._first = first
        self._standings = [Standing({name: Mastery(levels.first) for name, levels in self._levels.items()})]
        self._scores: dict[str, dict[int, list[tuple[int, float]]]] = {}  # by part and row: iteration, score

    def at(self, iteration: int) -> Standing:
        """The standing after the iterations before this one."""
        return self._standings[min(max(0, iteration - self._first), len(self._standings) - 1)]

    def apply(self, history: IterationHistory, drawn_in: int) -> None:
        """Add the scores of a committed iteration, in drawing order. drawn_in: the stage that it drew from."""
        standing = self._standings[-1]
        mastery, stage = dict(standing.mastery), self._stage(standing)
        scores = list(standing.recent)
        for group in history.groups():
            if group.score is None:
                continue
            source, level = source_and_level(group.source)
            levels = self._levels.get(source)
            if levels and level == mastery[source].highest:
                mastery[source] = mastery[source].after(group.score, levels)
            if source in self._pooled:
                self._note(group.source, group.row, history.iteration, group.score)
            # groups in flight at the end of a stage do not count for the next stage: they could end it without its own prompts
            if stage and _counts(stage, source) and drawn_in == standing.stage:
                scores.append(group.score)
        if stage:
            standing = _next_stage(replace(standing, recent=tuple(scores[-stage.groups :])), stage)
        if mastery != standing.mastery:
            standing = replace(standing, mastery=mastery)
        self._standings.append(standing)

    def share_of(self, part: str, row: int, pools: Pools, before: int) -> float:
        """Share of the passes that take a row, by its last score of the iterations before `before`: 1 for most rows."""
        scores = self._scores.get(part, {}).get(row, ())
        score = next((score for iteration, score in reversed(scores) if iteration < before), None)
        if score is None:
            return 1.0
        if score >= pools.solved_from:
            return pools.solved_share
        return pools.unsolved_share if score <= pools.unsolved_to else 1.0

    def _note(self, part: str, row: int, iteration: int, score: float) -> None:
        self._scores.setdefault(part, {}).setdefault(row, []).append((iteration, score))

    def _stage(self, standing: Standing) -> CurriculumStage | None:
        """The stage that may end; None in the last one, and without stages."""
        return self._stages[standing.stage] if standing.stage < len(self._stages) - 1 else None


def _counts(stage: CurriculumStage, source: str) -> bool:
    """Whether the rewards of a source's prompts may end the stage."""
    return stage.reward is not None and stage.weights.get(source, 0) > 0


def _next_stage(standing: Standing, stage: CurriculumStage) -> Standing:
    """The standing after one more iteration of the stage."""
    iterations, recent = standing.iterations + 1, standing.recent
    enough = stage.reward is not None and len(recent) >= stage.groups
    learned = enough and sum(recent) / len(recent) >= (stage.reward or 0.0)
    if learned or (stage.iterations is not None and iterations >= stage.iterations):
        return replace(standing, stage=standing.stage + 1, iterations=0, recent=())
    return replace(standing, iterations=iterations)
