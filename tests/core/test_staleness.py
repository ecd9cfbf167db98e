"""Admission by capacity keeps every sample within the bound; the check at train time is exact."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.staleness import admissible, capacity, staleness


def test_capacity_is_bounded_by_concurrency_and_never_negative() -> None:
    named = {"max_staleness": 1, "batch": 4, "version": 0, "accepted": 0}
    assert capacity(**named, max_concurrent=3, running=1) == 2
    assert capacity(**named, max_concurrent=None, running=9) == 0


@given(st.integers(0, 3), st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=60))
def test_no_history_of_admissions_trains_a_sample_too_old(
    bound: int, batch: int, history: list[bool]
) -> None:
    """Samples are admitted whenever there is room and trained in order of admission, a batch a version."""
    version, waiting, accepted = 0, [], 0
    for train in history:
        room = capacity(
            max_staleness=bound,
            batch=batch,
            version=version,
            max_concurrent=None,
            accepted=accepted,
            running=0,
        )
        waiting += [version] * room
        accepted += room
        if train and len(waiting) >= batch:
            assert all(version - drawn <= bound for drawn in waiting[:batch])
            waiting, version = waiting[batch:], version + 1


def test_the_oldest_token_decides() -> None:
    spans = [(0, 5), (40, 7)]
    assert staleness(spans, 7) == 2
    assert admissible(spans, 7, 2)
    assert not admissible(spans, 8, 2)
    assert staleness([], 9) == 0
