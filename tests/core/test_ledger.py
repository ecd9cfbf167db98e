"""The ledger, over histories that hypothesis makes up: nothing lost, nothing drawn twice, the same again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.accounts.history import GroupOutcome, IterationHistory, Key
from millrace.core.accounts.ledger import Draw, Ledger, epoch_order
from millrace.core.accounts.staleness import Ahead
from millrace.core.contracts.sample import Verdict
from millrace.core.errors import DataError

Sources = dict[str, tuple[float, int]]
ORDER = [11, 3, 10, 5, 8, 4, 7, 6, 1, 2, 9, 0]
VERDICTS: list[Verdict] = ["kept", "dropped", "returned"]

sources_ = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0]), st.integers(1, 12)),
    min_size=1,
)
requests_ = st.lists(st.tuples(st.integers(1, 15), st.integers(0, 10)), max_size=12)  # need, reserve


def judged(iteration: int, draws: list[Draw], verdict: Callable[[int], Verdict]) -> IterationHistory:
    """A committed iteration over these draws."""
    groups = []
    for draw in draws:
        said = verdict(draw.ordinal)
        groups.append(
            GroupOutcome(
                **vars(draw),
                verdict=said,
                reason="zero variance" if said == "dropped" else None,
                steps=[iteration + 1] if said == "kept" else [],
            )
        )
    return IterationHistory.of(iteration, groups)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31 - 1), sources_, requests_, st.booleans(), st.data())
def test_over_any_history_no_group_is_lost_and_none_is_drawn_twice_unless_returned(
    seed: int, sources: Sources, requests: list[tuple[int, int]], shuffle: bool, data: Any
) -> None:
    ledger = Ledger(seed, sources, shuffle=shuffle)
    history: list[IterationHistory] = []
    state: dict[Key, str] = {}
    done: Counter[Key] = Counter()
    for iteration, (need, reserve) in enumerate(requests):
        waiting = [key for key, said in state.items() if said == "returned"]
        draws = ledger.draw(iteration, need, reserve)
        assert [draw.ordinal for draw in draws] == list(range(need + reserve))
        keys = [draw.key for draw in draws]
        again = [key for key in keys if key in state]
        assert keys[: len(again)] == again, "returned groups come first"
        assert all(state[key] == "returned" for key in again), "nothing else is drawn again"
        assert len(again) == min(len(waiting), need + reserve), "none that waits is passed over"
        committed = judged(iteration, draws, lambda _: data.draw(st.sampled_from(VERDICTS)))
        state.update(zip(keys, committed.verdict, strict=True))
        done.update(key for key, said in zip(keys, committed.verdict, strict=True) if said != "returned")
        history.append(committed)
        # a restarted process sees only what JSON holds
        stored = [IterationHistory.model_validate_json(part.model_dump_json()) for part in history]
        fresh = Ledger(seed, sources, shuffle=shuffle).extend(stored)
        ledger.extend(history)
        assert (
            fresh.draw(iteration + 1, 7, 3)
            == ledger.draw(iteration + 1, 7, 3)
            == ledger.draw(iteration + 1, 7, 3)
        )
        assert sorted(fresh.returned) == sorted(key for key, said in state.items() if said == "returned")
    assert not done or max(done.values()) == 1, "trained or dropped once"
    assert sum(ledger.counts.values()) == sum(need + reserve for need, reserve in requests)
    assert ledger.dropped["zero variance"] == ledger.counts["dropped"]
    for name, (epoch, position) in ledger.drawn().items():
        rows = sources[name][1]
        seen = [
            Counter(row for source, row, e in state if (source, e) == (name, number))
            for number in range(epoch + 1)
        ]
        assert all(count == Counter(range(rows)) for count in seen[:-1]), (
            "each past epoch drew every row once"
        )
        assert len(seen[-1]) == position, "no row of this epoch is lost"
        assert set(seen[-1]) == set(epoch_order(seed, name, epoch, rows, shuffle)[:position])


@settings(max_examples=30, deadline=None)
@given(sources_, st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_within_each_draw_every_source_gets_its_share_to_within_two(
    sources: Sources, sizes: list[int]
) -> None:
    """Two, for up to four sources: what a source is behind or ahead at either end of the draw stays below one or so."""
    ledger = Ledger(0, sources)
    total = sum(weight for weight, _ in sources.values())
    overall: Counter[str] = Counter()
    for iteration, size in enumerate(sizes):
        draws = ledger.draw(iteration, size)
        counts = Counter(draw.source for draw in draws)
        overall.update(counts)
        for name, (weight, _) in sources.items():
            assert abs(counts[name] - size * weight / total) <= 2
            assert abs(overall[name] - sum(sizes[: iteration + 1]) * weight / total) < 2
        ledger.apply(judged(iteration, draws, lambda _: "kept"))


@settings(max_examples=30, deadline=None)
@given(sources_, st.lists(st.integers(1, 8), min_size=3, max_size=8), st.integers(0, 2), st.data())
def test_with_a_lag_a_draw_is_the_same_whether_or_not_the_iterations_before_it_are_committed(
    sources: Sources, sizes: list[int], lag: int, data: Any
) -> None:
    early, late = (Ledger(5, sources, ahead=Ahead(((0, lag),))) for _ in range(2))
    draws: list[list[Draw]] = []
    history: list[IterationHistory] = []
    for iteration, size in enumerate(sizes):
        # late commits as seldom as it may, early as soon as it can
        late.extend(history[: max(late.iterations, iteration - lag)])
        early.extend(history)
        mine = late.draw(iteration, size, 2)
        assert early.draw(iteration, size, 2) == mine
        assert not {draw.key for draw in mine} & set(late.in_flight), "a group in flight is not drawn"
        late.open(iteration, [draw.key for draw in mine])
        draws.append(mine)
        history.append(judged(iteration, mine, lambda _: data.draw(st.sampled_from(VERDICTS))))
    assert Ledger(5, sources).extend(history).counts == late.extend(history).counts


@settings(max_examples=30, deadline=None)
@given(sources_, st.lists(st.integers(1, 6), min_size=3, max_size=9), st.integers(0, 2), st.data())
def test_with_deferrals_and_a_lag_each_group_is_in_one_place_and_a_restart_knows_the_same(
    sources: Sources, sizes: list[int], lag: int, data: Any
) -> None:
    """A deferred group goes to the next iteration, and is trained, dropped, deferred again or returned there."""
    ahead = Ahead(((0, lag),))
    ledger = Ledger(5, sources, ahead=ahead)
    history: list[IterationHistory] = []
    deferred: list[GroupOutcome] = []
    drawn: list[list[Draw]] = []
    fate: dict[Key, str] = {}
    for iteration, size in enumerate(sizes):
        draws = ledger.draw(iteration, size, 1)
        taken = {draw.key for draw in draws}
        assert not taken & {key for key, said in fate.items() if said != "returned"}, "nothing is drawn twice"
        ledger.open(iteration, [draw.key for draw in draws])
        drawn.append(draws)
        fate |= dict.fromkeys(taken, "in flight")
        oldest = len(history)
        if iteration - oldest < lag and iteration + 1 < len(sizes):
            continue
        own = judged(oldest, drawn[oldest], lambda _: data.draw(st.sampled_from([*VERDICTS, "deferred"])))
        joined = [
            replaced(group, len(own.row) + at, oldest, data.draw(st.sampled_from([*VERDICTS, "deferred"])))
            for at, group in enumerate(deferred)
        ]
        groups = [*own.groups(), *joined]
        committed = IterationHistory.of(oldest, groups, joined=len(joined))
        assert committed.keys() == [draw.key for draw in drawn[oldest]]
        assert committed.joined_keys() == [group.key for group in deferred]
        deferred = [group for group in groups if group.verdict == "deferred"]
        assert committed.deferred_keys() == [group.key for group in deferred]
        fate |= {group.key: group.verdict for group in groups}
        history.append(committed)
        ledger.apply(committed)
        assert set(ledger.in_flight) >= {group.key for group in deferred}
        stored = [IterationHistory.model_validate_json(part.model_dump_json()) for part in history]
        again = Ledger(5, sources, ahead=ahead).extend(stored)
        for index in range(len(history), iteration + 1):
            again.open(index, [draw.key for draw in drawn[index]])
        assert again.draw(iteration + 1, 4, 2) == ledger.draw(iteration + 1, 4, 2)
        assert again.counts == ledger.counts
        assert sorted(again.in_flight) == sorted(ledger.in_flight)


def replaced(group: GroupOutcome, ordinal: int, iteration: int, verdict: Verdict) -> GroupOutcome:
    """A group that was deferred to an iteration, with what became of it there."""
    steps = [iteration + 1] if verdict == "kept" else []
    reason = "zero variance" if verdict == "dropped" else None
    return group.model_copy(update={"ordinal": ordinal, "verdict": verdict, "steps": steps, "reason": reason})


def test_a_history_without_scores_is_stored_as_by_earlier_releases() -> None:
    """Else the hashes of their manifests would differ."""
    history = judged(0, Ledger(0, {"a": (1.0, 3)}).draw(0, 2), lambda _: "kept")
    assert list(history.model_dump()) == [
        "iteration",
        "sources",
        "source",
        "row",
        "epoch",
        "verdict",
        "reasons",
        "steps",
    ]


def test_returned_groups_are_drawn_first_and_the_oldest_first() -> None:
    ledger = Ledger(0, {"a": (1.0, 100)})
    first = ledger.draw(0, 2, 4)
    ledger.apply(judged(0, first, lambda ordinal: "kept" if ordinal < 2 else "returned"))
    assert ledger.returned == [draw.key for draw in first[2:]]
    second = ledger.draw(1, 2)
    assert [draw.key for draw in second] == [draw.key for draw in first[2:4]]
    ledger.apply(judged(1, second, lambda ordinal: "kept" if ordinal else "returned"))
    assert ledger.returned == [first[ordinal].key for ordinal in (2, 4, 5)], (
        "returned twice, it keeps its place"
    )
    third = ledger.draw(2, 4)
    assert [draw.key for draw in third[:3]] == ledger.returned
    assert third[3].key not in {draw.key for draw in first}


def test_a_request_larger_than_an_epoch_goes_through_several() -> None:
    draws = Ledger(3, {"a": (1.0, 4)}).draw(0, 10)
    assert [draw.epoch for draw in draws] == [0] * 4 + [1] * 4 + [2] * 2
    orders = [[draw.row for draw in draws if draw.epoch == epoch] for epoch in range(3)]
    assert sorted(orders[0]) == sorted(orders[1]) == [0, 1, 2, 3]


def test_epochs_are_shuffled_by_seed_source_and_epoch_or_not_at_all() -> None:
    base = epoch_order(1, "a", 0, 50, shuffle=True).tolist()
    assert sorted(base) == list(range(50))
    assert base == epoch_order(1, "a", 0, 50, shuffle=True).tolist()
    others = [
        epoch_order(2, "a", 0, 50, True),
        epoch_order(1, "b", 0, 50, True),
        epoch_order(1, "a", 1, 50, True),
    ]
    assert all(order.tolist() != base for order in others)
    assert epoch_order(1, "a", 3, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_an_order_is_the_same_for_good() -> None:
    """A run may go on under another release of Python or numpy: this order was drawn with the first."""
    assert epoch_order(7, "default", 2, 12, shuffle=True).tolist() == ORDER


def test_weights_changed_under_a_run_take_effect_at_once() -> None:
    history = []
    before = Ledger(0, {"a": (9.0, 1000), "b": (1.0, 1000)})
    for iteration in range(20):
        history.append(judged(iteration, before.draw(iteration, 10), lambda _: "kept"))
        before.extend(history)
    after = Ledger(0, {"a": (1.0, 1000), "b": (1.0, 1000), "c": (2.0, 1000)}).extend(history)
    counts = Counter(draw.source for draw in after.draw(20, 40))
    assert abs(counts["a"] - 10) <= 4
    assert abs(counts["b"] - 10) <= 4
    assert abs(counts["c"] - 20) <= 4


@pytest.mark.parametrize(
    ("sources", "seed", "said"),
    [
        ({"a": (1.0, 9)}, 0, "its 9 usable rows now give"),
        ({"a": (1.0, 10)}, 1, "its 10 usable rows now give"),
        ({"b": (1.0, 10)}, 0, r"drew from source a, which is not among \['b'\]"),
    ],
)
def test_sources_that_could_not_have_given_the_history_are_refused(
    sources: Sources, seed: int, said: str
) -> None:
    ledger = Ledger(0, {"a": (1.0, 10)})
    history = [judged(0, ledger.draw(0, 8), lambda _: "kept")]
    with pytest.raises(DataError, match=said):
        Ledger(seed, sources).extend(history)


def test_a_group_trained_or_dropped_cannot_come_again() -> None:
    ledger = Ledger(0, {"a": (1.0, 10)})
    first = judged(0, ledger.draw(0, 4), lambda ordinal: "kept" if ordinal else "dropped")
    again = IterationHistory.of(1, first.groups())
    with pytest.raises(DataError, match="iteration 2 drew row"):
        Ledger(0, {"a": (1.0, 10)}).extend([first, again])


def test_iterations_are_taken_in_order_and_drawn_when_due() -> None:
    ledger = Ledger(0, {"a": (1.0, 10)})
    draws = ledger.draw(0, 2)
    with pytest.raises(AssertionError, match="without gaps"):
        ledger.apply(judged(1, draws, lambda _: "kept"))
    with pytest.raises(AssertionError, match="cannot be drawn"):
        ledger.draw(1, 2)
    ledger.open(0, [draw.key for draw in draws])
    with pytest.raises(AssertionError, match="1 iterations are open, the lag is 0"):
        ledger.draw(1, 2)
    other = judged(0, [Draw("a", 9, 9, 0)], lambda _: "kept")
    with pytest.raises(AssertionError, match="with the groups it drew"):
        ledger.apply(other)


def test_a_history_holds_every_group_with_reason_and_steps() -> None:
    groups = [
        GroupOutcome(source="b", row=3, epoch=0, ordinal=0, verdict="kept", steps=[4, 5]),
        GroupOutcome(source="a", row=1, epoch=2, ordinal=1, verdict="dropped", reason="zero variance"),
        GroupOutcome(source="b", row=0, epoch=1, ordinal=2, verdict="returned"),
        GroupOutcome(source="a", row=2, epoch=2, ordinal=3, verdict="kept", reason="stood in", steps=[5]),
    ]
    history = IterationHistory.of(6, reversed(groups))
    assert IterationHistory.model_validate_json(history.model_dump_json()).groups() == groups
    assert Ledger(0, {"a": (1.0, 1)}).dropped == Counter()


def test_a_ledger_may_begin_at_a_later_iteration_with_other_sources() -> None:
    old = Ledger(1, {"a": (1.0, 6)})
    first = old.draw(0, 4)
    groups = [GroupOutcome(**vars(draw), verdict="kept", steps=[1]) for draw in first]
    history = [IterationHistory.of(0, groups)]
    later = Ledger(2, {"a": (1.0, 9)}, first=1).extend(history)
    drawn = later.draw(1, 4)
    assert [draw.epoch for draw in drawn] == [0, 0, 0, 0]
    assert max(draw.row for draw in later.draw(1, 9)) == 8
