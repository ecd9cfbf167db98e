"""The kept table of pairs, and which run has which pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from tests.pairs.outcomes import Outcome, outcome, pairs

KEPT = Path(__file__).parent / "kept"
TABLE, RUNS = KEPT / "pairs.json", KEPT / "runs.json"


def kept_runs() -> list[list[str]]:
    """The features of each run of the covering set."""
    runs: list[list[str]] = json.loads(RUNS.read_text())
    return runs


def kept_table() -> dict[str, str]:
    """What becomes of each pair, as it was written."""
    table: dict[str, str] = json.loads(TABLE.read_text())
    return table


def table(runs: Sequence[Sequence[str]]) -> dict[str, str]:
    """What becomes of each pair, computed now. runs: the covering set."""
    where: dict[frozenset[str], int] = {}
    for number, run in enumerate(runs):
        for both in combinations(run, 2):
            where.setdefault(frozenset(both), number)
    return {
        f"{one} × {other}": _line(outcome(one, other), where.get(frozenset((one, other))))
        for one, other in pairs()
    }


def _line(found: Outcome, run: int | None) -> str:
    if found.kind != "runs":
        return str(found)
    return "not covered" if run is None else f"runs: run-{run:02d}"


def write(runs: Sequence[Sequence[str]]) -> None:
    """Keep the runs and the table."""
    RUNS.write_text(json.dumps(runs, indent=1) + "\n")
    lines = [
        f" {json.dumps(key, ensure_ascii=False)}: {json.dumps(text, ensure_ascii=False)}"
        for key, text in table(runs).items()
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
