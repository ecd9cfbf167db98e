"""The cut: who is trained, who is deferred, and that no group is deferred for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.accounts.selection import Candidate, Choice, choose, drawn

KEEP, DROP = True, False


def group(name: str, finished: int | None = None, keep: bool = False, deferrals: int = 0) -> Candidate:
    return Candidate(name, deferrals, finished, keep)


CASES: list[tuple[str, list[Candidate], int, int, Choice | None]] = [
    ("too few are whole", [group("a", 0, KEEP), group("b")], 2, 1, None),
    ("those that are whole first", [group("a"), group("b", 1, KEEP), group("c", 0, KEEP)], 2, 1,
     Choice(["b", "c"], ["a"], [])),
    ("whole and too many", [group("a", 2, KEEP), group("b", 1, KEEP), group("c", 0, KEEP)], 2, 1,
     Choice(["b", "c"], ["a"], [])),
    ("a dropped group fills no place", [group("a", 0, DROP), group("b", 1, KEEP), group("c")], 1, 1,
     Choice(["b"], ["c"], [])),
    ("one that may be deferred no more is waited for",
     [group("old", deferrals=1), group("b", 0, KEEP), group("c", 1, KEEP)], 2, 1, None),
    ("and is trained before others",
     [group("old", 2, KEEP, 1), group("b", 0, KEEP), group("c", 1, KEEP)], 2, 1, Choice(["old", "b"], ["c"], [])),
    ("unless a filter dropped it", [group("old", 2, DROP, 1), group("b", 0, KEEP), group("c", 1, KEEP)], 2, 1,
     Choice(["b", "c"], [], [])),
    ("twice deferred, with a limit of three", [group("old", deferrals=2), group("b", 0, KEEP)], 1, 3,
     Choice(["b"], ["old"], [])),
    ("nothing may be deferred", [group("a"), group("b", 0, KEEP), group("c", 1, KEEP)], 1, 0,
     Choice(["b"], [], ["a", "c"])),
    ("all are whole and too few kept", [group("a", 0, DROP), group("b", 1, KEEP)], 2, 1, Choice(["b"], [], [])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "need", "limit", "choice"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_cut(groups: list[Candidate], need: int, limit: int, choice: Choice | None) -> None:
    assert choose(groups, need, limit) == choice


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 5), st.integers(1, 3), st.data())
def test_over_iterations_no_group_is_deferred_too_often_and_none_is_lost(
    need: int, reserve: int, limit: int, data: Any
) -> None:
    """Groups are whole in any order; some are dropped. Each is trained, dropped or deferred, at most `limit` times."""
    waiting: dict[str, int] = {}
    begun = 0
    for _ in range(6):
        fresh = max(0, need + min(reserve, need) - len(waiting))
        groups = {**waiting, **{f"g{begun + at}": 0 for at in range(fresh)}}
        begun += fresh
        order = data.draw(st.permutations(list(groups)))
        kept = {name: data.draw(st.integers(0, 3)) > 0 for name in groups}
        finished: dict[str, int] = {}
        choice = None
        while choice is None:
            candidates = [
                Candidate(name, times, finished.get(name), name in finished and kept[name])
                for name, times in groups.items()
            ]
            choice = choose(candidates, need, limit)
            if choice is None:
                finished[order[len(finished)]] = len(finished)
        dropped = {name for name in finished if not kept[name]}
        assert not choice.returned, "nothing that was begun is given up"
        assert sorted([*choice.trained, *choice.deferred, *dropped]) == sorted(groups), "each has one fate"
        assert len(choice.trained) == need or len(finished) == len(groups)
        assert all(name in finished and kept[name] for name in choice.trained)
        waiting = {name: groups[name] + 1 for name in choice.deferred}
        assert all(times <= limit for times in waiting.values())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.floats(0.01, 1), st.integers(0, 4), st.data())
def test_as_many_groups_are_under_way_in_each_iteration_however_far_ahead(
    batch: int, reserve: float, ahead: int, data: Any
) -> None:
    """Each iteration draws before those right before it have made their cuts. Some trained a smaller batch, and deferred less."""
    most = batch + round(reserve * batch)
    draws: list[int] = []
    deferred: list[int] = []
    for index in range(12):
        known = index - ahead
        draws.append(drawn(batch, reserve, deferred[known - 1] if known > 0 else 0, draws[max(0, known) :]))
        under_way = draws[-1] + (deferred[-1] if deferred else 0)
        returned = data.draw(st.sampled_from([0, 0, 0, 1, 2]))
        deferred.append(max(0, under_way - batch - returned))
        assert under_way <= most, "no more is deferred than the next batch takes"
        if not any(deferred[at] < most - batch for at in range(index)):
            assert under_way == most
