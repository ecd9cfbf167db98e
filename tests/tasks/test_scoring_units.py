"""Which samples are scored together, however they land."""

from __future__ import annotations

from typing import Any

from millrace.core.contracts.sample import Unscored
from millrace.tasks.scoring.scoring_batches import ScoringUnits


def row(sample: str, group: str = "g", samples: int | None = None) -> Unscored:
    values: Any = {"sample_id": sample, "group_id": group, "samples": samples, "status": "completed"}
    return values


def ids(units: list[list[Unscored]]) -> list[list[str]]:
    return [[row["sample_id"] for row in unit] for unit in units]


def test_samples_that_are_scored_alone_wait_for_none() -> None:
    units = ScoringUnits(2, lambda row: False)
    assert ids(units.add([row("g-1"), row("g-0")], {"g-0"})) == [["g-1"]]


def test_a_group_waits_for_the_last_of_its_rollouts() -> None:
    units = ScoringUnits(3, lambda row: row["group_id"] == "g")
    assert ids(units.add([row("g-2"), row("h-0", "h"), row("g-0")], ())) == [["h-0"]]
    assert ids(units.add([row("g-1")], ())) == [["g-0", "g-1", "g-2"]]


def test_all_branches_of_a_rollout_are_waited_for() -> None:
    units = ScoringUnits(2, lambda row: True)
    assert ids(units.add([row("g-0.0", samples=2), row("g-0.1", samples=2)], ())) == []
    assert ids(units.add([row("g-1.0", samples=3), row("g-1.1", samples=3)], ())) == []
    (group,) = ids(units.add([row("g-1.2", samples=3)], ()))
    assert group == ["g-0.0", "g-0.1", "g-1.0", "g-1.1", "g-1.2"]


def test_a_group_that_was_scored_before_a_restart_is_not_scored_again() -> None:
    units = ScoringUnits(2, lambda row: True)
    assert units.add([row("g-0"), row("g-1")], {"g-0", "g-1"}) == []
    assert ids(units.add([row("h-0", "h"), row("h-1", "h")], {"h-0"})) == [["h-1"]]
