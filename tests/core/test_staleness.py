"""The age of a sample, and what may generate and train it."""

from __future__ import annotations

import pytest

from millrace.core.staleness import Ahead, VersionRange, admissible, staleness


@pytest.mark.parametrize(
    ("versions", "age"),
    [([], 0), ([7], 0), ([5], 2), ([5, 7], 2), ([7, 5], 2)],
    ids=["no token", "on policy", "older", "the oldest token decides", "wherever it stands"],
)
def test_staleness_counts_versions_since_the_oldest_token(versions: list[int], age: int) -> None:
    spans = [{"first_token": 40 * number, "version": version} for number, version in enumerate(versions)]
    assert staleness(spans, 7) == age  # type: ignore[arg-type]


def test_a_range_of_versions_holds_both_ends() -> None:
    versions = VersionRange(4, 6)
    assert [version in versions for version in (3, 4, 6, 7)] == [False, True, True, False]
    assert [versions.nearest(version) for version in (0, 5, 9)] == [4, 5, 6]
    assert VersionRange.only(3).is_one
    assert not versions.is_one


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
