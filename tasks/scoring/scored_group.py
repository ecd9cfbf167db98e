"""A drawn group while the filter waits for its scores."""

from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.core.contracts.ids import rollout_of, sample_id
from millrace.core.contracts.sample import ScoredSample
from millrace.core.hooks.group_filters import Judgement


@dataclass
class ScoredGroup:
    """A drawn group and the scores of its samples so far."""

    group_id: str
    prompt_id: str
    ordinal: int
    scores: dict[str, ScoredSample] = field(default_factory=dict)  # by sample id
    made: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # columns of rollouts for the filters; dropped once it is judged
    judgement: Judgement | None = None
    joined: int | None = None  # for a deferred group: its place among the groups deferred to the iteration
    deferrals: int = 0  # how many times it was deferred
    cut: Literal["deferred", "returned"] | None = None  # what the cut decided, if it is not trained

    @property
    def place(self) -> tuple[bool, int]:
        """Its place in the batch: deferred groups come first, then drawn ones in drawing order."""
        return self.joined is None, self.ordinal if self.joined is None else self.joined

    def rollout(self, index: int) -> list[ScoredSample]:
        """The scores of a rollout's samples; empty unless all are there."""
        rollout = sample_id(self.group_id, index)
        first = self.scores.get(rollout)
        if first is None:
            return []
        found = [first]
        if (first.samples or 1) > 1:
            found += sorted(
                (
                    score
                    for sid, score in self.scores.items()
                    if sid != rollout and rollout_of(sid) == rollout
                ),
                key=lambda score: score.sample_id,
            )
        return found if len(found) == (first.samples or 1) else []
