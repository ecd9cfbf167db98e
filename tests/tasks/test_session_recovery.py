"""Rollouts of several turns that are taken up again: from a record cut anywhere, and after a process was lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from millrace.tasks.generation.sessions.rollout_record import stored_events
from tests.support.session_place import Place, shown
from tests.support.slow_members import slow_but

CUTS = [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kind", "cut"),
    slow_but(
        product(["Countdown", "SavedCountdown", "calls"], CUTS),
        *[("Countdown", 0), ("Countdown", 3), ("SavedCountdown", 4), ("calls", 2), ("calls", 5)],
    ),
)
async def test_a_rollout_taken_up_at_any_event_is_the_one_that_was_never_cut(
    make_place: Callable[..., Place], tmp_path: Path, kind: str, cut: int
) -> None:
    notes = tmp_path / "notes"
    settings: dict[str, Any] = (
        {"function": ("calls", {"tool": "count", "path": str(notes)}), "tools": ["count"]}
        if kind == "calls"
        else {"environment": (kind, {"steps": 3, "notes": str(notes)})}
    )
    whole = make_place("one", "two", "three", **settings)
    expected = await whole.run()
    first_notes = notes.read_text()
    notes.unlink()
    stored = whole.rows[:cut]
    resumed = make_place("one", "two", "three", **settings)
    assert await resumed.run(stored) == expected
    turns = sum(row.kind == "segment" for row in stored)
    assert len(resumed.engines.requests) == len(whole.engines.requests) - turns
    recorded = sum(row.kind == "call" for row in stored)
    again = notes.read_text() if notes.exists() else ""
    assert again == (first_notes if kind == "Countdown" else first_notes[recorded:])
    assert [row.order for row in [*stored, *resumed.rows]] == list(range(len(whole.rows)))


@pytest.mark.parametrize("cut", slow_but([1, 2, 3, 4], 2))
async def test_calls_side_by_side_are_recorded_each_in_its_place(
    make_place: Callable[..., Place], tmp_path: Path, cut: int
) -> None:
    notes = tmp_path / "notes"
    settings: dict[str, Any] = {
        "function": ("calls_side_by_side", {"path": str(notes)}),
        "tools": ["count_later"],
    }
    whole = make_place("one", "two", **settings)
    expected = await whole.run()
    assert [row.event for row in whole.rows] == [0, 3, 2, 1, 4]
    notes.unlink()
    resumed = make_place("one", "two", **settings)
    assert await resumed.run(whole.rows[:cut]) == expected
    assert (notes.read_text() if notes.exists() else "") == "x" * (4 - cut)


async def test_a_stateless_environment_is_reset_again_and_its_recorded_steps_are_not_made(
    make_place: Callable[..., Place], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    settings = {"environment": ("Echo", {"notes": str(notes)})}
    whole = make_place("one", "four", "eleven more", **settings, max_turns=6)
    expected = await whole.run()
    made = notes.read_text()
    notes.unlink()
    resumed = make_place("one", "four", "eleven more", **settings, max_turns=6)
    assert await resumed.run(whole.rows[:2]) == expected
    assert notes.read_text() == "r" + made[2:]


async def test_what_differs_after_a_restart_is_generated_again_and_the_record_says_so(
    make_place: Callable[..., Place],
) -> None:
    first = make_place("one", "two", "three", function=("three_turns", {"add": "again"}))
    await first.run()
    other = make_place("one", "four", "five", function=("three_turns", {"add": "once more"}))
    (sample,) = await other.run(first.rows)
    trained = [t for t, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert shown(trained) == "one<|im_end|>four<|im_end|>five<|im_end|>"
    assert [row.kind for row in other.rows] == ["diverged", "segment", "segment"]
    third = make_place("none", function=("three_turns", {"add": "once more"}))
    assert await third.run([*first.rows, *other.rows]) == [sample]
    assert third.engines.requests == []


@pytest.mark.parametrize("lost", [0, 1])
async def test_what_follows_a_gap_is_generated_again_and_never_taken_for_what_was(
    make_place: Callable[..., Place], lost: int
) -> None:
    first = make_place("one", "two", "three", function="three_turns")
    await first.run()
    left = [row for row in first.rows if row.order != lost]
    second = make_place("uno", "due", "tre", function="three_turns")
    (sample,) = await second.run(stored_events(left)["g-0000"])
    assert len(second.engines.requests) == 3 - lost
    assert [(row.order, row.kind, row.event) for row in second.rows][:2] == [
        (3, "resumed", lost),
        (4, "segment", lost),
    ]
    third = make_place("none", function="three_turns")
    assert await third.run([*left, *second.rows]) == [sample]
    assert third.engines.requests == []
    assert third.rows == []


async def test_a_tool_that_takes_its_process_with_it_is_answered_so_and_the_rollout_goes_on(
    make_place: Callable[..., Place],
) -> None:
    place = make_place("one", "two", function=("calls", {"tool": "crash"}), tools=["crash"])
    (sample,) = await place.run()
    (call,) = [row for row in place.rows if row.kind == "call"]
    assert call.text == "crash failed: its process ended itself with exit code 1"
    assert (call.failed, sample.status, sample.turns) == (True, "completed", 2)
    assert len(place.engines.requests) == 2


@pytest.mark.parametrize(
    ("times", "status", "reason"),
    [(1, "completed", None), (2, "failed", "its process died of signal 9 (Killed)")],
)
async def test_a_rollout_whose_process_is_killed_fails_only_if_it_is_killed_alone_too(
    make_place: Callable[..., Place], tmp_path: Path, times: int, status: str, reason: str | None
) -> None:
    place = make_place("one", function=("is_killed", {"times": times, "path": str(tmp_path / "seen")}))
    (sample,) = await place.run()
    assert (sample.status, sample.reason) == (status, reason)
    assert len(place.engines.requests) == 1


@pytest.mark.parametrize("times", [1, 2])
async def test_a_call_whose_process_is_killed_is_made_once_more(
    make_place: Callable[..., Place], tmp_path: Path, times: int
) -> None:
    call = {"tool": "kills", "path": str(tmp_path / "seen"), "times": times}
    place = make_place("one", "two", function=("calls", call), tools=["kills"])
    (sample,) = await place.run()
    (row,) = [row for row in place.rows if row.kind == "call"]
    assert (sample.status, sample.turns) == ("completed", 2)
    assert row.text == ("done" if times == 1 else "kills failed: its process died of signal 9 (Killed)")
