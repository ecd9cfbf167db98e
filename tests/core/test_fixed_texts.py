"""Whether an engine answers as the version that it was given, or as an earlier one."""

from __future__ import annotations

import math

import pytest

from millrace.core.fixed_texts import EarlierVersions, Logprobs

FIRST, LAST, NOW = 0.0, 0.5, 1.0


def at(value: float) -> Logprobs:
    return [[-value, -value - 1], [-value]]


@pytest.mark.parametrize(
    ("engine", "now", "stale"),
    [
        (NOW, NOW, False),
        (NOW + 0.05, NOW, False),
        (LAST, NOW, True),
        (LAST + 0.1, NOW, True),
        (FIRST, NOW, True),
        (FIRST - 0.2, NOW, True),
        (0.8, NOW, False),  # far from the trainer, and from all that it was: sync.max_prompt_gap is for that
        (LAST, LAST, False),  # the trainer has not moved
        (LAST + 0.05, LAST + 0.1, False),  # nor by more than rounding
        (math.nan, NOW, True),
    ],
)
def test_an_engine_that_stayed_where_the_trainer_was_is_found(engine: float, now: float, stale: bool) -> None:
    earlier = EarlierVersions()
    assert not earlier.answer(at(NOW), at(engine)), "nothing is known of earlier versions"
    for value in (FIRST, LAST):
        earlier.note(at(value))
    assert earlier.answer(at(now), at(engine)) == stale


def test_the_first_version_is_kept_and_the_last_one_replaced() -> None:
    earlier = EarlierVersions()
    for value in (FIRST, LAST, NOW):
        earlier.note(at(value))
    assert (earlier.first, earlier.last) == (at(FIRST), at(NOW))
