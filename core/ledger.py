"""The ledger: which prompt group was drawn when, and what became of it. Pure.

A fold over the histories of committed iterations, and nothing else: a restarted process draws exactly what the one
before it would have drawn. What is saved is the frontier of committed iterations, never a generation cursor.

A group is one pass of a row of a source in one epoch: (source, row, epoch). It is fresh, then in flight once an
iteration has drawn it, then trained or dropped (both for good), or returned and so waiting to be drawn again.
The transition that must not exist: out of trained or dropped.

Invariants
- Within an epoch of a source each row is drawn once; again only after it was returned.
- A returned group is drawn before any fresh one, oldest first draw first, and keeps its epoch.
- A draw depends on the seed, the sources and the committed history alone. With a lag (iterations that are drawn before
  the ones before them are committed) it depends on no verdict younger than the lag, committed already or not.
- Fresh draws follow the weights: each goes to the source that is furthest behind its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from millrace.core.contracts.ids import derived_seed, iteration_number
from millrace.core.contracts.sample import Verdict
from millrace.core.errors import DataError

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

    @classmethod
    def of(cls, iteration: int, groups: Iterable[GroupOutcome]) -> IterationHistory:
        """The history that these groups make; their ordinals count from 0."""
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
        )

    def keys(self) -> list[Key]:
        """The groups' names, in drawing order."""
        return [
            (self.sources[n], row, epoch)
            for n, row, epoch in zip(self.source, self.row, self.epoch, strict=True)
        ]

    def groups(self) -> list[GroupOutcome]:
        """The groups, in drawing order."""
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
            )
            for ordinal, (source, row, epoch) in enumerate(self.keys())
        ]


@dataclass(frozen=True)
class Draw:
    """One group to generate. Ordinals past what the batch needs are the reserve."""

    source: str
    row: int
    epoch: int
    ordinal: int

    @property
    def key(self) -> Key:
        """The group's name across iterations."""
        return self.source, self.row, self.epoch


@dataclass
class _Cursor:
    """How far the epochs of a source are drawn, and how far the source is behind its share."""

    share: float
    rows: int
    epoch: int = 0
    position: int = 0
    credit: float = 0.0


@dataclass(frozen=True)
class _Returned:
    """A group that waits to be drawn again."""

    age: int  # number of its first draw
    since: int  # iteration that returned it


class Ledger:
    """The state after all committed iterations and the open ones that follow them."""

    def __init__(
        self,
        seed: int,
        sources: Mapping[str, tuple[float, int]],
        *,
        shuffle: bool = True,
        first: int = 0,
    ) -> None:
        """`sources`: weight and number of usable rows by name. `first`: the iteration from which these sources hold."""
        assert sources, "a run has at least one source"
        assert all(weight > 0 and rows > 0 for weight, rows in sources.values()), (
            "empty sources are refused before"
        )
        self.seed = seed
        self.shuffle = shuffle
        self.iterations = first  # committed
        self.counts: Counter[str] = Counter(kept=0, dropped=0, returned=0)  # verdicts
        self.dropped: Counter[str] = Counter()  # by reason
        total = sum(weight for weight, _ in sources.values())
        self._cursors = {
            name: _Cursor(weight / total, rows) for name, (weight, rows) in sorted(sources.items())
        }
        self._orders: dict[str, tuple[int, list[int]]] = {}
        self._open: dict[int, list[Key]] = {}
        self._returned: dict[Key, _Returned] = {}
        self._ages: dict[Key, int] = {}  # of groups in flight or returned
        self._drawn = 0

    def extend(self, history: Iterable[IterationHistory]) -> Ledger:
        """Apply the iterations of the history that are not applied yet, in order; returns this ledger."""
        for iteration in history:
            if iteration.iteration >= self.iterations:
                self.apply(iteration)
        return self

    def open(self, iteration: int, keys: Sequence[Key]) -> None:
        """Mark the groups that an iteration drew as in flight: its verdicts are not committed.

        Raises DataError, naming the difference, if the sources could not have given these groups.
        """
        assert iteration == self.next_iteration, (
            f"iteration {iteration} opened, {self.next_iteration} is next"
        )
        for key in keys:
            if self._returned.pop(key, None) is None:
                self._take_fresh(iteration, key)
        self._open[iteration] = list(keys)

    def apply(self, history: IterationHistory) -> None:
        """Apply a committed iteration. Raises DataError if the sources could not have given its groups."""
        assert history.iteration == self.iterations, "iterations are committed in order, without gaps"
        keys = history.keys()
        if history.iteration not in self._open:
            self.open(history.iteration, keys)
        assert self._open.pop(history.iteration) == keys, "an iteration is committed with the groups it drew"
        for key, verdict in zip(keys, history.verdict, strict=True):
            self.counts[verdict] += 1
            if verdict == "returned":
                self._returned[key] = _Returned(self._ages[key], history.iteration)
            else:
                del self._ages[key]
        for reason, ordinals in history.reasons.items():
            self.dropped[reason] += sum(history.verdict[ordinal] == "dropped" for ordinal in ordinals)
        self.iterations += 1

    @property
    def next_iteration(self) -> int:
        """The first iteration that is not drawn yet."""
        return self.iterations + len(self._open)

    @property
    def in_flight(self) -> list[Key]:
        """Groups of open iterations."""
        return [key for keys in self._open.values() for key in keys]

    @property
    def returned(self) -> list[Key]:
        """Groups that wait to be drawn again, oldest first."""
        return sorted(self._returned, key=lambda key: self._returned[key].age)

    def drawn(self) -> dict[str, tuple[int, int]]:
        """Epoch and rows drawn within it, by source."""
        return {name: (cursor.epoch, cursor.position) for name, cursor in self._cursors.items()}

    def draw(self, iteration: int, need: int, reserve: int = 0, lag: int = 0) -> list[Draw]:
        """The groups of the next iteration: `need` for the batch, then `reserve` to stand in for dropped ones.

        `lag`: iterations that may be open before this one; groups they returned are not drawn yet, so that it does
        not matter whether they are committed. Changes nothing: only commits count.
        """
        assert iteration == self.next_iteration, (
            f"iteration {iteration} cannot be drawn, {self.next_iteration} is next"
        )
        assert len(self._open) <= lag, f"{len(self._open)} iterations are open, the lag is {lag}"
        count = need + reserve
        waiting = [key for key in self.returned if self._returned[key].since < iteration - lag]
        keys = waiting[:count]
        cursors = {name: _Cursor(**vars(cursor)) for name, cursor in self._cursors.items()}
        while len(keys) < count:
            name = _furthest_behind(cursors)
            _advance(cursors, name)
            cursor = cursors[name]
            keys.append((name, self._row(name, cursor.epoch, cursor.position - 1), cursor.epoch))
        assert len(set(keys)) == count, "no group is drawn twice"
        return [Draw(*key, ordinal) for ordinal, key in enumerate(keys)]

    def _take_fresh(self, iteration: int, key: Key) -> None:
        """Advance a source past a fresh group that an iteration drew."""
        source, row, epoch = key
        if source not in self._cursors:
            raise DataError(
                f"iteration {iteration_number(iteration)} drew from source {source}, which is not among "
                f"{sorted(self._cursors)}",
                where="data.sources",
                remedy="put it back, or start a run under another run.name",
            )
        _advance(self._cursors, source)
        cursor = self._cursors[source]
        expected = self._row(source, cursor.epoch, cursor.position - 1)
        if (expected, cursor.epoch) != (row, epoch):
            raise DataError(
                f"iteration {iteration_number(iteration)} drew row {row} of source {source} in epoch {epoch}, where its "
                f"{cursor.rows} usable rows now give row {expected} in epoch {cursor.epoch}: the source, run.seed, "
                "data.shuffle or what makes a row usable changed under the run",
                where="data.sources",
                remedy="put it back, or start a run under another run.name",
            )
        self._ages[key] = self._drawn
        self._drawn += 1

    def _row(self, source: str, epoch: int, position: int) -> int:
        """The row at a position of an epoch's order; the last order of each source is kept."""
        kept, order = self._orders.get(source, (-1, []))
        if kept != epoch:
            order = epoch_order(self.seed, source, epoch, self._cursors[source].rows, self.shuffle)
            self._orders[source] = epoch, order
        return order[position]


def epoch_order(seed: int, source: str, epoch: int, rows: int, shuffle: bool) -> list[int]:
    """The order in which an epoch draws the rows of a source.

    RandomState, because numpy freezes its streams for good: a run may go on under another version.
    """
    if not shuffle:
        return list(range(rows))
    number = derived_seed(seed, "epoch", source, epoch)
    order: list[int] = np.random.RandomState([number & 0xFFFFFFFF, number >> 32]).permutation(rows).tolist()
    return order


def _furthest_behind(cursors: Mapping[str, _Cursor]) -> str:
    """The source with the largest credit after the next draw's shares; the first by name among equals."""
    return max(cursors, key=lambda name: cursors[name].credit + cursors[name].share)


def _advance(cursors: Mapping[str, _Cursor], name: str) -> None:
    """Count one fresh draw from a source, into its next epoch if the one before is exhausted.

    Credits are bounded, so that weights changed under a run take effect at once and are not applied to its past.
    """
    bound = float(len(cursors))
    for cursor in cursors.values():
        cursor.credit = min(bound, max(-bound, cursor.credit + cursor.share))
    cursor = cursors[name]
    cursor.credit = max(-bound, cursor.credit - 1)
    if cursor.position == cursor.rows:
        cursor.epoch, cursor.position = cursor.epoch + 1, 0
    cursor.position += 1
