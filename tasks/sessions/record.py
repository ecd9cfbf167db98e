"""The record of one rollout: its turns and calls as they were committed, and as they go on.

Owns what of an earlier attempt counts: an event is found again as long as the rollout asks for the same, in the same place.
From the first difference in a branch on, what was recorded there does not count any more, and says so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from millrace.core.contracts.turns import TurnRow


class RolloutRecord:
    """Events of one rollout, by branch, in order."""

    def __init__(self, rows: Iterable[TurnRow] = ()) -> None:
        """rows: in their order, without gaps."""
        self._events: dict[int, dict[int, list[TurnRow]]] = defaultdict(dict)  # by branch and number
        self.rows = 0
        for row in rows:
            self.note(row)

    def note(self, row: TurnRow) -> None:
        """Add the next row."""
        self.rows += 1
        events = self._events[row.branch]
        if row.kind == "diverged":
            for event in [event for event in events if event >= row.event]:
                del events[event]
        else:
            events.setdefault(row.event, []).append(row)

    def turn(self, branch: int, event: int, prompt: str) -> list[TurnRow] | None:
        """The segments of a recorded turn. prompt: hash of all ids before it."""
        return self._find(branch, event, lambda row: row.kind == "segment" and row.prompt == prompt)

    def answer(self, branch: int, event: int, tool: str, arguments: Mapping[str, Any]) -> TurnRow | None:
        """A recorded call."""
        text = arguments_text(arguments)
        found = self._find(branch, event, lambda row: row.tool == tool and row.arguments == text)
        return found[0] if found else None

    def differs(self, branch: int, event: int) -> bool:
        """Whether something else is recorded there: it does not count from now on."""
        return event in self._events[branch]

    def _find(self, branch: int, event: int, same: Any) -> list[TurnRow] | None:
        rows = self._events[branch].get(event)
        return rows if rows and same(rows[0]) else None


def stored_events(rows: Iterable[TurnRow]) -> dict[str, list[TurnRow]]:
    """What is recorded of each rollout, in order. What follows a gap, which a broken part leaves, is not taken."""
    found: dict[str, list[TurnRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.order):
        if row.order == len(found[row.rollout_id]):
            found[row.rollout_id].append(row)
    return found


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Arguments as they are stored and compared."""
    return json.dumps(arguments, ensure_ascii=False, sort_keys=True, default=str)
