"""Rollouts of several turns for the soak: a tool whose calls leave a line each, and an environment of each recovery class.

Owns the user's module, the sessions that use it, and what a killed run must not do twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from millrace.core.contracts.turns import place_of_columns, rows_that_count

NOTES = "SOAK_NOTES"  # a file: each call of the tool adds a line
MODULE = '''
import os
import random

from millrace import Done, Observation, Session, Task, Turn


async def tool(session: Session) -> float:
    """Two answers with a noted call between them, and a critic in every second rollout."""
    turn = await session.generate()
    session.observe(await session.call("note", key=f"{session.rng.getrandbits(64):x}"), "user")
    turn = await session.generate()
    if session.task.index % 2:
        critic = session.branch("critic", prompt="is it " + "".join(c for c in turn.text[:3] if c.isalnum()))
        critic.reward(float(len((await critic.generate()).text) % 3))
    return session.rng.random()


def note(key: str) -> str:
    """Write a line into a file.

    Args:
        key: What.
    """
    with open(os.environ["SOAK_NOTES"], "a") as file:
        file.write(key + "\\n")
    return "ok"


class Stateless:
    """Says how far off the length of an answer is from one that follows from the prompt."""

    recovery = "stateless"

    async def reset(self, task: Task) -> Observation:
        self.wanted = random.Random(task.prompt).randint(2, 8)
        return Observation("go", "user")

    async def step(self, turn: Turn) -> Observation | Done:
        off = abs(len(turn.output_ids) - self.wanted)
        if not off or turn.prompt_tokens > 30:
            return Done(1.0 / (1 + off), {"off": float(off)})
        return Observation(f"off {off}", "user")

    async def close(self) -> None:
        pass


class Restart(Stateless):
    """Counts its steps, and has nothing to go on from."""

    recovery = "restart"

    async def reset(self, task: Task) -> Observation:
        self.left = 2
        return await super().reset(task)

    async def step(self, turn: Turn) -> Observation | Done:
        self.left -= 1
        seen = await super().step(turn)
        return seen if isinstance(seen, Done) or self.left else Done(0.5, {"off": 1.0})


class Snapshot(Restart):
    """The same, with a state to go on from."""

    recovery = "snapshot"

    def snapshot(self) -> str:
        return f"{self.left} {self.wanted}"

    def restore(self, state: str) -> None:
        self.left, self.wanted = map(int, state.split())
'''
SESSIONS: dict[str, Mapping[str, Any]] = {
    "tool": {"function": "soak_rollouts:tool", "tools": ["soak_rollouts:note"]},
    "stateless": {"environment": "soak_rollouts:Stateless"},
    "snapshot": {"environment": "soak_rollouts:Snapshot"},
    "restart": {"environment": "soak_rollouts:Restart"},
}


def recorded_calls(parts: Iterable[Path]) -> list[str]:
    """What recorded calls of the tool noted."""
    return [
        json.loads(row["arguments"])["key"]
        for row in _rows(parts)
        if row["kind"] == "call" and row["tool"] == "note"
    ]


def recorded_turns(parts: Iterable[Path]) -> set[str]:
    """Requests of recorded turns."""
    found: set[str] = set()
    rollouts: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(parts):
        rollouts.setdefault(row["rollout_id"], []).append(row)
    for rollout, rows in rollouts.items():
        turns: Counter[int] = Counter()
        for row in sorted(rows_that_count(rows, place_of_columns), key=lambda row: row["event"]):
            if row["kind"] == "segment":
                found.add(f"{rollout}.{row['branch']:02d}.{turns[row['branch']]:04d}")
                turns[row["branch"]] += 1
    return found


def noted(file: Path) -> Counter[str]:
    """How often each call of the tool was made."""
    return Counter(file.read_text().split()) if file.exists() else Counter()


def made_again(recorded: Iterable[str], before: Counter[str], after: Counter[str]) -> list[str]:
    """Calls that were made again though their answers were recorded."""
    return [key for key in recorded if after[key] != before[key]]


def _rows(parts: Iterable[Path]) -> list[dict[str, Any]]:
    return [row for path in parts for row in pq.read_table(path).to_pylist()]
