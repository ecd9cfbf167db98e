"""The ledger: which prompt was drawn when, and what became of it. Pure.

A fold over the histories of committed iterations, and nothing else: a process that starts anew draws exactly what the
one before it would have drawn. What counts is the frontier of committed iterations, never a generation cursor.

Invariants
- Within an epoch of a source each row is drawn once; it is drawn again in that epoch only after it was returned.
- A returned group is drawn before any fresh row, oldest first, and keeps its epoch.
- A draw depends on the seed, the sources and the committed history alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from core.ids import derived_seed

Verdict = Literal["kept", "dropped", "returned"]


class GroupOutcome(BaseModel):
    """What became of a drawn group."""

    source: str
    row: int
    epoch: int
    ordinal: int
    verdict: Verdict
    reason: str | None = None


class IterationHistory(BaseModel):
    """The groups of a committed iteration, in drawing order."""

    iteration: int
    groups: list[GroupOutcome]


@dataclass(frozen=True)
class Draw:
    """One group to generate. Ordinals past what the batch needs are the reserve."""

    source: str
    row: int
    epoch: int
    ordinal: int


@dataclass
class _Cursor:
    """How far the epochs of a source are drawn."""

    weight: float
    rows: int
    epoch: int = 0
    position: int = 0
    drawn: int = 0


class Ledger:
    """The state after all committed iterations."""

    def __init__(self, seed: int, sources: Mapping[str, tuple[float, int]], shuffle: bool) -> None:
        assert sources, "a run has at least one source"
        assert all(rows > 0 for _, rows in sources.values()), "a source without usable rows is refused before"
        self.seed = seed
        self.shuffle = shuffle
        self.iterations = 0
        self.counts: dict[str, int] = {"kept": 0, "dropped": 0, "returned": 0}
        self.returned: deque[tuple[str, int, int]] = deque()  # source, row, epoch
        self._cursors = {name: _Cursor(weight, rows) for name, (weight, rows) in sorted(sources.items())}
        self._orders: dict[tuple[str, int], list[int]] = {}

    @classmethod
    def fold(
        cls,
        seed: int,
        sources: Mapping[str, tuple[float, int]],
        history: Sequence[IterationHistory],
        *,
        shuffle: bool = True,
    ) -> Ledger:
        """The ledger after these iterations. `sources`: weight and number of usable rows by name."""
        ledger = cls(seed, sources, shuffle)
        for iteration in history:
            ledger.apply(iteration)
        return ledger

    def apply(self, history: IterationHistory) -> None:
        """Take in one more committed iteration."""
        assert history.iteration == self.iterations, "iterations are committed in order"
        drawn = self._draw(len(history.groups))
        for (source, row, epoch), group in zip(
            drawn, sorted(history.groups, key=lambda g: g.ordinal), strict=True
        ):
            same = (source, row, epoch) == (group.source, group.row, group.epoch)
            assert same, (
                f"iteration {history.iteration} drew {group}, the ledger says {source} row {row} epoch {epoch}"
            )
            self.counts[group.verdict] += 1
            if group.verdict == "returned":
                self.returned.append((source, row, epoch))
        self.iterations += 1

    def draw(self, iteration: int, need: int, reserve: int = 0) -> list[Draw]:
        """The groups of the next iteration: `need` for the batch, then `reserve` to stand in for dropped ones."""
        assert iteration == self.iterations, (
            f"iteration {iteration} cannot be drawn: {self.iterations} are committed"
        )
        ahead = self.copy()._draw(need + reserve)
        return [Draw(source, row, epoch, ordinal) for ordinal, (source, row, epoch) in enumerate(ahead)]

    def copy(self) -> Ledger:
        """A ledger that can go on without changing this one."""
        twin = Ledger(
            self.seed, {name: (c.weight, c.rows) for name, c in self._cursors.items()}, self.shuffle
        )
        twin.iterations, twin.counts, twin.returned = self.iterations, dict(self.counts), deque(self.returned)
        twin._orders = self._orders
        for name, cursor in self._cursors.items():
            twin._cursors[name] = _Cursor(**vars(cursor))
        return twin

    def _draw(self, count: int) -> list[tuple[str, int, int]]:
        again = [self.returned.popleft() for _ in range(min(count, len(self.returned)))]
        return again + [self._fresh() for _ in range(count - len(again))]

    def _fresh(self) -> tuple[str, int, int]:
        """The next row of the source that is furthest behind its share."""
        total = sum(cursor.weight for cursor in self._cursors.values())
        drawn = sum(cursor.drawn for cursor in self._cursors.values()) + 1
        name = max(
            self._cursors,
            key=lambda n: self._cursors[n].weight / total * drawn - self._cursors[n].drawn,
        )
        cursor = self._cursors[name]
        if cursor.position == cursor.rows:
            cursor.epoch, cursor.position = cursor.epoch + 1, 0
        row = self._order(name, cursor.epoch)[cursor.position]
        cursor.position += 1
        cursor.drawn += 1
        return name, row, cursor.epoch

    def _order(self, name: str, epoch: int) -> list[int]:
        key = (name, epoch)
        if key not in self._orders:
            order = list(range(self._cursors[name].rows))
            if self.shuffle:
                random.Random(derived_seed(self.seed, "epoch", name, epoch)).shuffle(order)
            self._orders[key] = order
        return self._orders[key]
