"""Which weights made which token of an answer: a version that made none is not among them."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.connectors.engines.client import Generation
from millrace.connectors.engines.dispatcher import NOTHING, joined
from millrace.connectors.engines.sglang.client import that_made


def piece(count: int, version: int, finish: str = "abort") -> Generation:
    return Generation(
        np.arange(count, dtype=np.int32), np.zeros(count), "x" * count, finish, [(0, version)], "engine-0", 0
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pieces", "spans"),
    [
        ([(7, 1), (4, 2)], [(0, 1), (7, 2)]),
        ([(7, 1), (4, 1)], [(0, 1)]),
        ([(7, 1), (0, 2), (4, 3)], [(0, 1), (7, 3)]),  # cut before its first token
        ([(7, 1), (0, 2), (4, 1)], [(0, 1)]),
        ([(0, 1), (7, 2), (0, 3)], [(0, 2)]),
        ([(0, 1), (0, 2)], [(0, 2)]),
    ],
)
def test_a_piece_without_tokens_leaves_no_version(
    pieces: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    made = NOTHING
    for count, version in pieces:
        made = joined(made, piece(count, version))
    assert made.weight_versions == spans
    assert len(made.output_ids) == sum(count for count, _ in pieces)
    assert joined(made, piece(0, 9, "stop")).finish == "stop"


@pytest.mark.parametrize(
    ("spans", "count", "kept"),
    [
        ([(0, 1)], 3, [(0, 1)]),
        ([(0, 1), (2, 2)], 3, [(0, 1), (2, 2)]),
        ([(0, 1), (2, 2), (2, 3)], 3, [(0, 1), (2, 3)]),
        ([(0, 1), (0, 2), (2, 3)], 2, [(0, 2)]),  # the last came after the last token
        ([(0, 1), (0, 2)], 0, [(0, 2)]),
    ],
)
def test_weights_that_came_and_went_between_two_tokens_made_none(
    spans: list[tuple[int, int]], count: int, kept: list[tuple[int, int]]
) -> None:
    assert that_made(spans, count) == kept
