"""The table of an iteration's samples: kept ones with their advantages, dropped ones with the reasons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.store import Store
from millrace.core.plain_text import printable

T = TypeVar("T")
LONGEST = 500  # characters of a text
SHOWN = (
    "verdict",
    "reason",
    "reward",
    "answer",
    "reward_texts",
    "advantage",
    "prompt",
    "response",
    "label",
    "status",
    "source",
    "sample_id",
)
FOUND = ["reward", "answer", "reward_texts"]
KEPT = ["sample_id", "source", "prompt", "response", "label", *FOUND, "advantage", "status"]
GENERATED = ["sample_id", "source", "prompt", "response", "label", "status", "reason"]


def sample_rows(folder: Store, most: int) -> list[dict[str, Any]]:
    """At most `most` samples of an iteration's folder: at most half of them dropped ones, of each reason in turn.

    Samples come from all over the iteration, in drawing order.
    """
    dropped = _dropped(folder, most // 2)
    batch = folder.read_table("batch.parquet", "batch", columns=KEPT)
    taken = spread(range(batch.num_rows), most - len(dropped))
    kept = [{**row, "verdict": "kept"} for row in batch.take(taken).to_pylist()]
    return [{name: _shown(row.get(name)) for name in SHOWN} for row in [*kept, *dropped]]


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items, at equal distances."""
    if most <= 0 or not items:
        return []
    step = max(1, -(-len(items) // most))
    return list(items[::step])


def by_turns(reasons: Sequence[str | None], most: int) -> list[int]:
    """Places of at most `most` items, one of each reason in turn, in their order."""
    places: dict[str | None, list[int]] = {}
    for place, reason in enumerate(reasons):
        places.setdefault(reason, []).append(place)
    rounds = max(map(len, places.values()), default=0)
    order = [of[turn] for turn in range(rounds) for of in places.values() if turn < len(of)]
    return sorted(order[:most])


def _dropped(folder: Store, most: int) -> list[dict[str, Any]]:
    if most <= 0:
        return []
    verdicts = folder.read_table("verdicts.parquet", "verdicts", columns=["sample_id", "verdict", "reason"])
    judged = verdicts.filter(pc.equal(verdicts.column("verdict"), "dropped")).to_pylist()
    chosen = [judged[place] for place in by_turns([row["reason"] for row in judged], most)]
    if not chosen:
        return []
    wanted = pa.array([row["sample_id"] for row in chosen])
    found: dict[str, dict[str, Any]] = {row["sample_id"]: {} for row in chosen}
    for kind, columns in (("rollouts", GENERATED), ("rewards", ["sample_id", *FOUND, "reason"])):
        table = read_parts(folder, kind, kind, columns=columns)
        for row in table.filter(pc.is_in(table.column("sample_id"), wanted)).to_pylist():
            found[row["sample_id"]] |= {name: value for name, value in row.items() if value is not None}
    return [
        {
            **found[row["sample_id"]],
            **row,
            "reason": _reason(row["reason"], found[row["sample_id"]].get("reason")),
        }
        for row in chosen
    ]


def _reason(of_verdict: str | None, of_failure: str | None) -> str | None:
    return ": ".join(dict.fromkeys(reason for reason in (of_verdict, of_failure) if reason)) or None


def _shown(value: Any) -> Any:
    """A value as a cell: JSON text as what it says, messages and named texts a line each, all of it not too long."""
    if isinstance(value, list):
        value = json.dumps("\n".join(f"{name}: {text}" for name, text in value))
    if not isinstance(value, str):
        return value
    try:
        content = json.loads(value)
    except ValueError:
        content = value
    if isinstance(content, list) and all(isinstance(message, dict) for message in content):
        text = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in content)
    else:
        text = content if isinstance(content, str) else value
    return printable(text[:LONGEST])
