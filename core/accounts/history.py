"""What became of the groups of a committed iteration. The ledger is computed from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from millrace.core.contracts.sample import Verdict

Key = tuple[str, int, int]  # source, row, epoch


class GroupOutcome(BaseModel):
    """What became of a drawn group in its iteration."""

    source: str
    row: int
    epoch: int
    ordinal: int
    verdict: Verdict
    reason: str | None = None
    steps: list[int] = []  # weight versions made by the steps that take its samples; empty unless kept
    score: float | None = None  # mean reward of its scored rollouts; None without one
    std: float | None = None  # standard deviation of these rewards; None if the run has no buffer

    @property
    def key(self) -> Key:
        """The group's name across iterations."""
        return self.source, self.row, self.epoch


class IterationHistory(BaseModel):
    """The groups of a committed iteration: columns in drawing order, so that a manifest stays small."""

    model_config = ConfigDict(extra="forbid")

    iteration: int
    sources: list[str]
    source: list[int]  # number of the name in `sources`
    row: list[int]
    epoch: list[int]
    verdict: list[Verdict]
    reasons: dict[str, list[int]] = {}  # ordinals by reason
    steps: dict[int, list[int]] = {}  # ordinals by step
    scores: list[float | None] = []  # score of each group; empty if no group has one
    stds: list[float | None] = []  # standard deviation of each group; empty if no group has one
    # groups of earlier iterations that were trained again: ordinals by iteration
    reused: dict[int, list[int]] = {}
    # groups that it drew; the groups after them were deferred to it. None: it drew all
    drawn: int | None = None

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The stored form, without what is empty."""
        later = ("scores", "stds", "reused")
        return {
            name: value
            for name, value in handler(self).items()
            if (value or name not in later) and (value is not None or name != "drawn")
        }

    @classmethod
    def of(
        cls,
        iteration: int,
        groups: Iterable[GroupOutcome],
        reused: Mapping[int, Iterable[int]] | None = None,
        joined: int = 0,
    ) -> IterationHistory:
        """The history of these groups, whose ordinals count from 0. reused: ordinals by iteration.

        joined: how many groups, the last ones, were deferred to the iteration.
        """
        ordered = sorted(groups, key=lambda group: group.ordinal)
        assert [group.ordinal for group in ordered] == list(range(len(ordered))), "ordinals count from 0"
        names = sorted({group.source for group in ordered})
        numbers = {name: number for number, name in enumerate(names)}
        reasons: dict[str, list[int]] = {}
        steps: dict[int, list[int]] = {}
        for group in ordered:
            assert bool(group.steps) == (group.verdict == "kept"), "kept groups have steps, others none"
            if group.reason is not None:
                reasons.setdefault(group.reason, []).append(group.ordinal)
            for step in group.steps:
                steps.setdefault(step, []).append(group.ordinal)
        return cls(
            iteration=iteration,
            sources=names,
            source=[numbers[group.source] for group in ordered],
            row=[group.row for group in ordered],
            epoch=[group.epoch for group in ordered],
            verdict=[group.verdict for group in ordered],
            reasons=reasons,
            steps=steps,
            scores=[group.score for group in ordered]
            if any(group.score is not None for group in ordered)
            else [],
            stds=[group.std for group in ordered] if any(group.std is not None for group in ordered) else [],
            reused={earlier: sorted(ordinals) for earlier, ordinals in sorted((reused or {}).items())},
            drawn=len(ordered) - joined if joined else None,
        )

    def reused_places(self) -> list[tuple[int, int]]:
        """Iteration and ordinal of each group of an earlier iteration that was trained again."""
        return [(earlier, ordinal) for earlier, ordinals in self.reused.items() for ordinal in ordinals]

    def keys(self) -> list[Key]:
        """The names of the groups that the iteration drew, in drawing order."""
        return self.all_keys()[: self.drawn]

    def joined_keys(self) -> list[Key]:
        """The names of the groups that were deferred to it."""
        return [] if self.drawn is None else self.all_keys()[self.drawn :]

    def deferred_keys(self) -> list[Key]:
        """The names of the groups that it deferred to the next iteration."""
        verdicts = zip(self.all_keys(), self.verdict, strict=True)
        return [key for key, verdict in verdicts if verdict == "deferred"]

    def all_keys(self) -> list[Key]:
        """The names of all its groups: first the drawn ones, then those deferred to it."""
        return [
            (self.sources[n], row, epoch)
            for n, row, epoch in zip(self.source, self.row, self.epoch, strict=True)
        ]

    def groups(self) -> list[GroupOutcome]:
        """All its groups; groups deferred to it have the ordinals after the drawn ones."""
        reason = {ordinal: text for text, ordinals in self.reasons.items() for ordinal in ordinals}
        steps: dict[int, list[int]] = {}
        for step, ordinals in sorted(self.steps.items()):
            for ordinal in ordinals:
                steps.setdefault(ordinal, []).append(step)
        return [
            GroupOutcome(
                source=source,
                row=row,
                epoch=epoch,
                ordinal=ordinal,
                verdict=self.verdict[ordinal],
                reason=reason.get(ordinal),
                steps=steps.get(ordinal, []),
                score=self.scores[ordinal] if self.scores else None,
                std=self.stds[ordinal] if self.stds else None,
            )
            for ordinal, (source, row, epoch) in enumerate(self.all_keys())
        ]
