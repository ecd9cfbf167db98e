"""Which checkpoints stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.periodic import checkpoints_to_drop


@pytest.mark.parametrize(
    ("complete", "last", "every", "scores", "dropped"),
    [
        ([], 1, None, {}, []),
        ([10, 20, 30], 1, None, {}, [10, 20]),
        ([10, 20, 30], 2, None, {}, [10]),
        ([10, 20, 30, 40], 1, 20, {}, [10, 30]),
        ([10, 20, 30], 1, None, {10: 0.5, 20: 0.4}, [20]),
        ([10, 20, 30], 1, None, {10: 0.5, 20: 0.5}, [20]),
        ([10, 20, 30], 1, None, {5: 0.9, 20: 0.4}, [10]),
    ],
)
def test_the_newest_the_regular_and_the_best_stay(
    complete: list[int], last: int, every: int | None, scores: dict[int, float], dropped: list[int]
) -> None:
    assert checkpoints_to_drop(complete, last, every, scores) == dropped


@given(
    st.lists(st.integers(1, 500), unique=True, min_size=1),
    st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.dictionaries(st.integers(1, 500), st.floats(0, 1)),
)
def test_what_recovery_needs_is_never_dropped(
    complete: list[int], last: int, every: int | None, scores: dict[int, float]
) -> None:
    dropped = checkpoints_to_drop(complete, last, every, scores)
    assert max(complete) not in dropped
    assert set(dropped) <= set(complete)
    assert len(complete) - len(dropped) >= min(last, len(complete))
