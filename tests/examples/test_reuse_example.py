"""The example of off-policy reuse is run: two short iterations with a random model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.test_examples import SOME_REWARD, iterations, rows, workplace
from tests.support.flow_runs import Workplace

__all__ = ["workplace"]


def rewards(iteration: Path) -> dict[str, float]:
    """Mean reward of each group."""
    found: dict[str, list[float]] = {}
    for row in rows(iteration):
        found.setdefault(row["group_id"], []).append(row["reward"])
    return {group: sum(each) / len(each) for group, each in found.items()}


@pytest.mark.slow
def test_only_undecided_groups_are_trained_once_more(workplace: Workplace) -> None:
    first, second = iterations(workplace, "reuse", "undecided", *SOME_REWARD)
    again = {row["group_id"] for row in rows(second) if row["reused_from"] == 0}
    assert len(again) == 2
    assert all(0.2 <= rewards(first)[group] <= 0.7 for group in again)
    assert len(rewards(second)) == 8
    workplace.call("verify", "undecided", "--root", str(first.parents[2]))
