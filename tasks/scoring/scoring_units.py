"""Which samples are scored together: each alone, or all of a prompt once the last of them is there.

Owns the wait for a prompt's samples, which land in any order; knows nothing of files or of how samples are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from millrace.core.contracts.ids import rollout_of
from millrace.core.contracts.sample import Unscored


class ScoringUnits:
    """Collects rows. A rollout's branches arrive together."""

    def __init__(self, rollouts: int, by_group: Callable[[Unscored], bool]) -> None:
        """rollouts: of a prompt. by_group: whether a row is scored together with the others of its prompt."""
        self._rollouts = rollouts
        self._by_group = by_group
        self._waiting: dict[str, list[Unscored]] = {}

    def add(self, rows: Sequence[Unscored], done: Collection[str]) -> list[list[Unscored]]:
        """Units that can be scored after these rows, in order. done: samples that have a score."""
        ready: list[list[Unscored]] = []
        for row in rows:
            if not self._by_group(row):
                ready.append([row])
                continue
            group = self._waiting.setdefault(row["group_id"], [])
            group.append(row)
            branches = row["samples"] or 1
            rollout = rollout_of(row["sample_id"])
            whole = sum(rollout_of(other["sample_id"]) == rollout for other in group) == branches
            if whole and len({rollout_of(other["sample_id"]) for other in group}) == self._rollouts:
                ready.append(sorted(self._waiting.pop(row["group_id"]), key=lambda row: row["sample_id"]))
        units = ([row for row in unit if row["sample_id"] not in done] for unit in ready)
        return [unit for unit in units if unit]
