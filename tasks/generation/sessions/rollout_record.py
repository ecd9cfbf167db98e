"""The record of one rollout: its committed turns and calls, and new ones.

Owns which events of an earlier attempt count: an event is found again if the rollout makes the same request in the same place.
From the first difference in a branch on, its recorded events no longer count, and a row says so.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from millrace.core.contracts.turns import TurnRow, first_gap, rows_that_count
from millrace.core.plain_text import json_text


class RolloutEvents:
    """Events of one rollout, by branch, in order."""

    def __init__(self, rows: Iterable[TurnRow] = ()) -> None:
        """rows: all stored rows of this rollout."""
        self._rows = list(rows)
        self._events = self._that_count()
        self.gap = first_gap(self._rows)  # a `resumed` row must name it before another row is added
        self.next_order = max((row.order for row in self._rows), default=-1) + 1

    def note(self, row: TurnRow) -> None:
        """Add the next row."""
        assert row.order == self.next_order, "rows are added in their order"
        self.next_order += 1
        self._rows.append(row)
        if row.kind in ("segment", "call"):
            self._events[row.branch].setdefault(row.event, []).append(row)
        else:
            self._events, self.gap = self._that_count(), first_gap(self._rows)

    def _that_count(self) -> dict[int, dict[int, list[TurnRow]]]:
        events: dict[int, dict[int, list[TurnRow]]] = defaultdict(dict)  # by branch and number
        for row in rows_that_count(self._rows):
            events[row.branch].setdefault(row.event, []).append(row)
        return events

    def turn(self, branch: int, event: int, prompt: str) -> list[TurnRow] | None:
        """The segments of a recorded turn. prompt: hash of all ids before it."""
        return self._find(branch, event, lambda row: row.kind == "segment" and row.prompt == prompt)

    def answer(self, branch: int, event: int, tool: str, arguments: Mapping[str, Any]) -> TurnRow | None:
        """A recorded call; None if the rollout made another one or none."""
        text = arguments_text(arguments)
        found = self._find(branch, event, lambda row: row.tool == tool and row.arguments == text)
        return found[0] if found else None

    def differs(self, branch: int, event: int) -> bool:
        """Whether another event is recorded there, which no longer counts."""
        return event in self._events[branch]

    def _find(self, branch: int, event: int, same: Any) -> list[TurnRow] | None:
        rows = self._events[branch].get(event)
        return rows if rows and same(rows[0]) else None


def stored_events(rows: Iterable[TurnRow]) -> dict[str, list[TurnRow]]:
    """The stored rows of each rollout."""
    found: dict[str, list[TurnRow]] = defaultdict(list)
    for row in rows:
        found[row.rollout_id].append(row)
    return found


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Arguments in the form that is stored and compared."""
    return json_text(arguments, sort_keys=True, default=str)
