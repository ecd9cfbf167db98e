"""The age of a sample, and what may generate and train it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.accounts.staleness import (
    Ahead,
    VersionRange,
    admissible,
    ahead_after,
    lowered,
    oldest_versions,
    token_ages,
)
from millrace.core.contracts.sample import PolicySpan

SPANS = pa.list_(pa.struct([("first_token", pa.int32()), ("version", pa.int64())]))


def age_of(spans: Sequence[Any], version: int) -> int:
    """Versions between a sample's oldest token and a version."""
    return version - int(oldest_versions(pa.chunked_array([[spans]], SPANS), version)[0])


def test_the_oldest_versions_of_many_samples_are_those_of_each() -> None:
    found = [[], [4], [3, 2, 9], [], [1, 1], [7]]
    rows = [[{"first_token": at, "version": version} for at, version in enumerate(row)] for row in found]
    whole = pa.chunked_array([rows[:3], [], rows[3:]], SPANS)
    assert oldest_versions(whole, 8).tolist() == [8, 4, 2, 8, 1, 7]
    assert oldest_versions(whole.slice(2, 3), 8).tolist() == [2, 8, 1]
    assert oldest_versions(pa.chunked_array([], SPANS), 8).tolist() == []


@pytest.mark.parametrize(
    ("versions", "age"),
    [([], 0), ([7], 0), ([5], 2), ([5, 7], 2), ([7, 5], 2)],
    ids=["no token", "on policy", "older", "the oldest token decides", "wherever it stands"],
)
def test_staleness_counts_versions_since_the_oldest_token(versions: list[int], age: int) -> None:
    spans = [{"first_token": 40 * number, "version": version} for number, version in enumerate(versions)]
    assert age_of(spans, 7) == age


def test_a_range_of_versions_holds_both_ends() -> None:
    versions = VersionRange(4, 6)
    assert [version in versions for version in (3, 4, 6, 7)] == [False, True, True, False]
    assert [versions.nearest(version) for version in (0, 5, 9)] == [4, 5, 6]
    assert VersionRange.only(3) == VersionRange(3, 3)


def test_how_far_ahead_a_run_was_is_kept_by_the_iteration_that_is_drawn() -> None:
    ahead = Ahead().since(0, 0).since(5, 1).since(9, 1).since(12, 0)
    assert ahead.spans == ((5, 1), (12, 0))
    assert [ahead.at(iteration) for iteration in (0, 4, 5, 11, 12, 99)] == [0, 0, 1, 1, 0, 0]
    assert ahead.since(7, 2).spans == ((5, 1), (7, 2)), "iterations that were given up are drawn again"


@pytest.mark.parametrize(
    ("oldest", "iteration", "bound", "steps", "may"),
    [(6, 3, 0, 2, True), (5, 3, 0, 2, False), (4, 3, 1, 2, True), (3, 3, 1, 2, False), (0, 1, 3, 2, True)],
)
def test_a_token_may_be_as_old_as_the_bound_in_published_versions(
    oldest: int, iteration: int, bound: int, steps: int, may: bool
) -> None:
    assert admissible(oldest, iteration, bound, steps) == may


def spans(*versions: tuple[int, int]) -> list[PolicySpan]:
    return [PolicySpan(first_token=first, version=version) for first, version in versions]


@pytest.mark.parametrize(
    ("made_by", "steps", "ages"),
    [
        (spans(), 1, [0, 0, 0, 0, 0]),
        (spans((0, 6)), 1, [0, 0, 0, 0, 0]),
        (spans((0, 5), (3, 6)), 1, [1, 1, 1, 0, 0]),
        (spans((0, 3), (1, 4), (4, 6)), 1, [3, 2, 2, 2, 0]),
        (spans((0, 2), (2, 4)), 2, [2, 2, 1, 1, 1]),
        (spans((0, 5)), 2, [1, 1, 1, 1, 1]),
        (spans((0, 7)), 1, [0, 0, 0, 0, 0]),
    ],
    ids=[
        "no span",
        "on policy",
        "crossed an update",
        "crossed two",
        "two steps an iteration",
        "between two published ones",
        "newer than asked",
    ],
)
def test_ages_of_tokens_count_published_versions(
    made_by: list[PolicySpan], steps: int, ages: list[int]
) -> None:
    assert token_ages(made_by, 5, 6, steps).tolist() == ages


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=5),
    st.integers(0, 12),
    st.integers(1, 4),
)
def test_the_oldest_token_of_a_sample_is_as_old_as_the_sample(
    parts: list[tuple[int, int]], trained: int, steps: int
) -> None:
    length = sum(tokens for tokens, _ in parts)
    versions = [min(version, trained) for _, version in parts]
    starts = [sum(tokens for tokens, _ in parts[:number]) for number in range(len(parts))]
    made_by = spans(*zip(starts, versions, strict=True))
    ages = token_ages(made_by, length, trained, steps)
    assert len(ages) == length
    assert ages.max() == -(-age_of(made_by, trained) // steps)
    assert all(
        ages[start] == 0 for start, version in zip(starts, versions, strict=True) if version == trained
    )


@pytest.mark.parametrize(
    ("history", "ahead", "after"),
    [
        ([], 2, 2),
        ([0.1, 0.1], 2, 2),
        ([0.1, 0.1, 0.1], 2, 1),
        ([0.1, 0.1, 0.1], 1, 0),
        ([0.1, 0.1, 0.1], 0, 0),
        ([0.1, 0.1, 0.5], 2, 2),
        ([0.1, 0.6, 0.1], 2, 2),
        ([0.1, None, 0.1], 2, 2),
        ([0.9, 0.1, 0.4, 0.2], 2, 1),
        ([0.1, 0.1, 0.1, 0.9], 2, 2),
    ],
    ids=[
        "nothing measured",
        "too few",
        "low three times",
        "down to turns",
        "in turns already",
        "at the bound is enough",
        "one was good",
        "one was not measured",
        "the newest count",
        "it has recovered",
    ],
)
def test_a_run_goes_less_far_ahead_when_its_weights_degenerate(
    history: list[float | None], ahead: int, after: int
) -> None:
    assert ahead_after(history, ahead, 0.5) == after


shares = st.floats(0, 1)


@given(st.lists(st.none() | shares, max_size=8), st.integers(0, 8), shares, shares)
def test_it_goes_at_most_one_down_never_up_and_a_higher_bound_never_keeps_more(
    history: list[float | None], ahead: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert ahead_after(history, ahead, low) in {ahead, max(0, ahead - 1)}
    assert ahead_after(history, ahead, high) <= ahead_after(history, ahead, low)
    assert ahead_after([*history, 1.0], ahead, high) == ahead


runs_of_ess = st.lists(st.none() | st.sampled_from([0.1, 0.4, 0.6]) | shares, min_size=1, max_size=24)


def decisions(ess: list[float | None], ahead: int, bound: float) -> Ahead:
    """What is decided of each iteration in turn, each from all that may be committed by then, and from no more."""
    made = Ahead(((0, ahead),))
    for iteration in range(len(ess)):
        known = dict(
            enumerate(ess[: iteration - made.at(iteration)] if iteration > made.at(iteration) else [])
        )
        made = lowered(made, iteration, known, bound)
    return made


@given(runs_of_ess, st.integers(0, 4), shares)
def test_how_far_ahead_a_run_may_be_follows_from_what_is_committed_before_each_draw(
    ess: list[float | None], ahead: int, bound: float
) -> None:
    made = decisions(ess, ahead, bound)
    values = [made.at(iteration) for iteration in range(len(ess))]
    assert values[0] == ahead
    for iteration, (before, after) in enumerate(pairwise(values), 1):
        assert after in (before, before - 1)
        if after < before:
            since = max(i for i in range(iteration) if i == 0 or values[i] < values[i - 1])
            seen = ess[since : iteration - before]
            assert len(seen) >= 3, "three iterations were drawn under the setting and are committed"
            assert all(value is not None and value < bound for value in seen[-3:])


@given(runs_of_ess, st.integers(0, 4), shares, st.data())
def test_a_run_that_goes_on_decides_as_one_that_was_never_killed(
    ess: list[float | None], ahead: int, bound: float, data: st.DataObject
) -> None:
    """Whatever else is committed by then, and for an iteration that was decided already: what is decided is in run.json."""
    whole = decisions(ess, ahead, bound)
    killed = data.draw(st.integers(1, len(ess)))
    kept = Ahead(tuple(span for span in whole.spans if span[0] < killed))
    for iteration in range(killed, len(ess)):
        kept = lowered(kept, iteration, dict(enumerate(ess)), bound)
        assert lowered(kept, iteration, dict(enumerate(ess)), bound) == kept
    assert kept == whole
