"""The warm-up that leaves much to learn: half of its sums are answered by their first term."""

from __future__ import annotations

import random

from examples.warm_ups.sums_warm_up import LESSONS, lessons


def test_half_of_the_lessons_are_guesses() -> None:
    sums = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(1, 9) for b in range(1, 9)]
    made = list(lessons(sums, 0.5, random.Random(1)))
    assert len(made) == LESSONS
    right = sum(row["label"] == str(sum(map(int, row["prompt"].strip("=").split("+")))) for row in made)
    guessed = sum(row["label"] == row["prompt"].split("+")[0] for row in made)
    assert right + guessed == LESSONS
    assert 0.48 < guessed / LESSONS < 0.52
