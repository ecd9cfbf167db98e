"""The ledger: which prompt group was drawn when, and what became of it. Pure.

It is computed from the histories of committed iterations, and from nothing else: a restarted process draws exactly what the
previous one would have drawn. What is saved is the frontier of committed iterations, never a generation cursor.

A group is one pass of a row of a source in one epoch: (source, row, epoch). It is fresh, then in flight once an
iteration has drawn it, then trained or dropped (both for good), or returned and so waiting to be drawn again. A deferred group
stays in flight: the next iteration has it, besides the groups that it draws. The transition that must not exist: out of trained
or dropped.

Invariants
- Within an epoch of a source each row is drawn once; again only after it was returned.
- A returned group is drawn before any fresh one, oldest first draw first, and keeps its epoch.
- A draw depends on the seed, the sources and the committed history alone. With a lag (iterations that are drawn before earlier
  ones are committed) it depends on no verdict younger than the lag, committed already or not.
- Fresh draws follow the weights: each goes to the source that is furthest behind its share.
- Levels, pools and stages change what is fresh by the scores of committed iterations alone (millrace.core.accounts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millrace.core.accounts.curriculum import (
    CurriculumProgress,
    SourcePlan,
    Standing,
    part_name,
    source_and_level,
)
from millrace.core.accounts.history import IterationHistory, Key
from millrace.core.accounts.staleness import Ahead
from millrace.core.config.data import CurriculumStage, Pools
from millrace.core.contracts.ids import derived_seed, iteration_number
from millrace.core.errors import DataError

Order = NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """One group to generate. Ordinals past what the batch needs are the reserve."""

    source: str  # NAME@LEVEL for a source with levels
    row: int
    epoch: int
    ordinal: int

    @property
    def key(self) -> Key:
        """The group's name across iterations."""
        return self.source, self.row, self.epoch


@dataclass
class _Share:
    """How far a source is behind its share, and how many fresh groups it gave."""

    credit: float = 0.0
    fresh: int = 0


@dataclass
class _Cursor:
    """How far the epochs of a source, or of one of its levels, are drawn, and which iteration started the epoch."""

    rows: int
    epoch: int = 0
    position: int = 0
    begun: int = 0


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
        sources: Mapping[str, SourcePlan | tuple[float, int]],
        *,
        shuffle: bool = True,
        first: int = 0,
        stages: Sequence[CurriculumStage] = (),
        ahead: Ahead = Ahead(),
    ) -> None:
        """`sources`: weight and number of usable rows by name, with levels and pools. `stages`: of a curriculum.

        `first`: the iteration from which these sources hold. `ahead`: the lag, how many iterations may be open when one is
        drawn. Draws, and the levels, pools and stages that they follow, see only iterations older than the lag.
        """
        plans = {name: SourcePlan(*plan) for name, plan in sorted(sources.items())}
        rows = {part: count for name, plan in plans.items() for part, count in plan.parts(name).items()}
        assert rows, "a run has at least one source"
        assert all(rows.values()), "empty sources are refused before"
        assert all(plan.weight > 0 for plan in plans.values()), "a source without a weight is refused before"
        self.seed = seed
        self.shuffle = shuffle
        self.iterations = first  # committed
        self._first = first
        self.counts: Counter[str] = Counter(kept=0, dropped=0, returned=0)  # verdicts
        self.dropped: Counter[str] = Counter()  # by reason
        self.progress = CurriculumProgress(plans, stages, first)
        self._plans, self._stages, self._lag = plans, list(stages), ahead.at
        self._shares = {name: _Share() for name in plans}
        self._cursors = {part: _Cursor(count) for part, count in rows.items()}
        self._rows = rows
        self._orders: dict[str, tuple[tuple[int, int], Order]] = {}
        self._open: dict[int, list[Key]] = {}
        self._returned: dict[Key, _Returned] = {}
        self.deferred: list[Key] = []  # by the newest applied iteration, to the next one
        self._ages: dict[Key, int] = {}  # ages of groups in flight or returned
        self._drawn = 0

    def use_ahead(self, ahead: Ahead) -> None:
        """Use `ahead` from the next iteration on. It must give the same lag for iterations that are drawn already."""
        self._lag = ahead.at

    def extend(self, history: Iterable[IterationHistory]) -> Ledger:
        """Apply the iterations of the history that are not applied yet, in order; returns this ledger."""
        for iteration in history:
            if iteration.iteration >= self.iterations:
                self.apply(iteration)
        return self

    def open(self, iteration: int, keys: Sequence[Key]) -> None:
        """Mark the groups that an iteration drew as in flight, until its verdicts are committed.

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
        joined = history.joined_keys()
        known = (
            history.iteration > self._first
            # after a change of the data the deferred groups are of other sources
        )
        assert not known or sorted(joined) == sorted(self.deferred), (
            "an iteration has the groups deferred to it"
        )
        self.deferred = []
        for key in joined if not known else ():
            self._ages[key] = self._drawn
        for key, verdict in zip([*keys, *joined], history.verdict, strict=True):
            self.counts[verdict] += 1
            if verdict == "returned":
                self._returned[key] = _Returned(self._ages[key], history.iteration)
            elif verdict == "deferred":
                self.deferred.append(key)
            else:
                del self._ages[key]
        for reason, ordinals in history.reasons.items():
            self.dropped[reason] += sum(history.verdict[ordinal] == "dropped" for ordinal in ordinals)
        self.progress.apply(history, self.standing(history.iteration).stage)
        self.iterations += 1

    @property
    def next_iteration(self) -> int:
        """The first iteration that is not drawn yet."""
        return self.iterations + len(self._open)

    @property
    def in_flight(self) -> list[Key]:
        """Groups of open iterations, including groups deferred to the first of them."""
        return [*self.deferred, *(key for keys in self._open.values() for key in keys)]

    @property
    def returned(self) -> list[Key]:
        """Groups that wait to be drawn again, oldest first."""
        return sorted(self._returned, key=lambda key: self._returned[key].age)

    def drawn(self) -> dict[str, tuple[int, int]]:
        """Epoch and rows drawn within it, by source, or by level of a source that has levels."""
        return {name: (cursor.epoch, cursor.position) for name, cursor in self._cursors.items()}

    def draw(self, iteration: int, need: int, reserve: int = 0) -> list[Draw]:
        """The groups of the next iteration: `need` for the batch, then `reserve` to replace dropped ones.

        Groups that the lag's iterations returned are not drawn yet, so that it does not matter whether these are committed.
        Does not change the ledger: only commits do.
        """
        assert iteration == self.next_iteration, (
            f"iteration {iteration} cannot be drawn, {self.next_iteration} is next"
        )
        lag = self._lag(iteration)
        assert len(self._open) <= lag, f"{len(self._open)} iterations are open, the lag is {lag}"
        count = need + reserve
        waiting = [key for key in self.returned if self._returned[key].since < iteration - lag]
        keys = waiting[:count]
        standing = self.standing(iteration)
        weights = self._weights(standing)
        shares = {name: replace(share) for name, share in self._shares.items()}
        cursors = {part: replace(cursor) for part, cursor in self._cursors.items()}
        while len(keys) < count:
            # the largest credit after the next draw's weights; the first by name among equals
            drawn_from = [name for name in shares if weights[name] > 0]
            name = max(drawn_from, key=lambda name: shares[name].credit + weights[name])
            part = self._part(name, shares[name].fresh, standing)
            _take(shares, weights, name)
            keys.append(self._next(cursors, part, iteration))
        assert len(set(keys)) == count, "no group is drawn twice"
        return [Draw(*key, ordinal) for ordinal, key in enumerate(keys)]

    def standing(self, iteration: int) -> Standing:
        """The levels and the stage that an iteration's draws follow."""
        return self.progress.at(iteration - self._lag(iteration))

    def _take_fresh(self, iteration: int, key: Key) -> None:
        """Advance a source past a fresh group that an iteration drew."""
        part, row, epoch = key
        if part not in self._cursors:
            raise DataError(
                f"iteration {iteration_number(iteration)} drew from source {part}, which is not among "
                f"{sorted(self._cursors)}",
                where="data.sources",
                remedy="put it back, or start a run under another run.name",
            )
        standing = self.standing(iteration)
        _take(self._shares, self._weights(standing), source_and_level(part)[0])
        expected = self._next(self._cursors, part, iteration)
        if expected != key:
            raise DataError(
                f"iteration {iteration_number(iteration)} drew row {row} of source {part} in epoch {epoch}, where its "
                f"{self._rows[part]} usable rows now give row {expected[1]} in epoch {expected[2]}: the source, run.seed, "
                "data.shuffle or what makes a row usable changed under the run",
                where="data.sources",
                remedy="put it back, or start a run under another run.name",
            )
        self._ages[key] = self._drawn
        self._drawn += 1

    def _weights(self, standing: Standing) -> dict[str, float]:
        """Each source's share of fresh draws; they sum to 1."""
        weights = {name: plan.weight for name, plan in self._plans.items()}
        if self._stages:
            now = self._stages[standing.stage].weights
            weights = {name: now.get(name, 0.0) for name in weights}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def _part(self, name: str, fresh: int, standing: Standing) -> str:
        """The part that the next fresh group of a source is drawn from; `fresh`: how many it gave before.

        For a source with levels: any level of the window, each as likely (RLVE, arXiv:2511.07317, section 3).
        """
        levels = self._plans[name].levels
        if levels is None:
            return name
        highest = standing.mastery[name].highest
        lowest = max(levels.first, highest - levels.window + 1)
        return part_name(
            name, lowest + derived_seed(self.seed, "level", name, fresh) % (highest - lowest + 1)
        )

    def _next(self, cursors: Mapping[str, _Cursor], part: str, iteration: int) -> Key:
        """Advance past the next row of a part, into its next epoch if the current one is exhausted."""
        cursor = cursors[part]
        if cursor.position == cursor.rows:
            begun = iteration - self._lag(iteration)
            cursor.epoch, cursor.position, cursor.begun = cursor.epoch + 1, 0, begun
            cursor.rows = len(self._order(part, cursor))
        cursor.position += 1
        return part, int(self._order(part, cursor)[cursor.position - 1]), cursor.epoch

    def _order(self, part: str, cursor: _Cursor) -> Order:
        """The rows of a cursor's epoch; the last order of each part is kept."""
        pools = self._plans[source_and_level(part)[0]].pools if cursor.epoch else None
        which = cursor.epoch, cursor.begun if pools else 0
        kept = self._orders.get(part)
        if kept is None or kept[0] != which:
            order = epoch_order(self.seed, part, cursor.epoch, self._rows[part], self.shuffle)
            kept = which, self._without_resting(part, order, cursor, pools) if pools else order
            self._orders[part] = kept
        return kept[1]

    def _without_resting(self, part: str, order: Order, cursor: _Cursor, pools: Pools) -> Order:
        """The rows that this epoch takes, in their order; all rows if it would take none."""
        taken = [
            row
            for row in order.tolist()
            if _chance(self.seed, part, cursor.epoch, row)
            < self.progress.share_of(part, row, pools, cursor.begun)
        ]
        return np.asarray(taken, dtype=np.int64) if taken else order


def _chance(seed: int, part: str, epoch: int, row: int) -> float:
    """A number in [0, 1) that a row has in an epoch."""
    return derived_seed(seed, "pool", part, epoch, row) % 2**32 / 2**32


def epoch_order(seed: int, source: str, epoch: int, rows: int, shuffle: bool) -> Order:
    """The order [rows] in which an epoch draws the rows of a source.

    RandomState, because numpy never changes its streams: a run may continue under another version.
    """
    if not shuffle:
        return np.arange(rows, dtype=np.int64)
    number = derived_seed(seed, "epoch", source, epoch)
    return np.random.RandomState([number & 0xFFFFFFFF, number >> 32]).permutation(rows).astype(np.int64)


def _take(shares: Mapping[str, _Share], weights: Mapping[str, float], name: str) -> None:
    """Count one fresh draw from a source.

    Credits are bounded, so that weights changed under a run take effect at once and are not applied to its past.
    """
    bound = float(len(shares))
    for other, share in shares.items():
        share.credit = min(bound, max(-bound, share.credit + weights[other]))
    shares[name].credit = max(-bound, shares[name].credit - 1)
    shares[name].fresh += 1
