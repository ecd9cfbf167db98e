"""How a pack is cut for cuDNN's attention."""

from __future__ import annotations

from itertools import pairwise

import pytest

from millrace.connectors.trainers.ops.dense_attention import SHORTEST, cut, rounded

PACKS = {
    "one long": [16384],
    "equal": [2048] * 8,
    "mixed": [1023, 1024, 1025, 3000, 17, 3001, 2990, 5000, 1],
    "short": [5, 9, 1, 700],
    "seven alike": [2047] * 7,
}


def bounds_of(lengths: list[int]) -> tuple[int, ...]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return tuple(ends)


@pytest.mark.parametrize("name", PACKS)
def test_each_row_is_in_one_part_and_sequences_stay_whole(name: str) -> None:
    bounds = bounds_of(PACKS[name])
    parts = cut(bounds)
    rows = [row for part in parts for row in part.rows if row >= 0]
    assert sorted(rows) == list(range(bounds[-1]))
    starts = dict(pairwise(bounds))
    for part in parts:
        ends = part.bounds or tuple(range(0, len(part.rows) + 1, part.length))
        for a, b in pairwise(ends):
            held = part.rows[a:b]
            start, end = held[0], starts[held[0]]
            assert held == [*range(start, end), *[-1] * (b - a - (end - start))]
            assert (end - start < SHORTEST) == bool(part.bounds)


def test_equal_sequences_of_a_round_length_are_taken_as_they_lie() -> None:
    (part,) = cut(bounds_of([2048] * 8))
    assert part.rows == list(range(16384))
    assert (part.count, part.length) == (8, 2048)


def test_shapes_recur() -> None:
    lengths = {rounded(length) for length in range(SHORTEST, 32769)}
    assert len(lengths) <= 42
    assert all(length <= rounded(length) <= length * 1.13 for length in range(SHORTEST, 32769))
    assert {part.count for part in cut(bounds_of([2047] * 7))} == {1, 2, 4}
