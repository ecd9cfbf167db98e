"""An answer of several requests ends at a stop text as one request's does, although an engine looks in its own tokens alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.connectors.engines.client import Generation
from millrace.connectors.engines.dispatching.pieces import ended_at_stop, joined

ALPHABET = "abé日"  # one, two and three bytes, a token each byte


def text_of(ids: Sequence[int]) -> str:
    """Of tokens that are bytes."""
    return bytes(ids).decode(errors="replace")


def end_of(text: str, params: Mapping[str, Any], least: int) -> bool:
    return any(stop in text for stop in params["stop"]) or any(
        re.search(pattern, text) for pattern in params["stop_regex"]
    )


def piece(ids: Sequence[int], first: int, last: int, params: Mapping[str, Any]) -> Generation:
    """What an engine makes of the tokens from `first` on, which looks for stops in these alone."""
    least = params["min_new_tokens"] - first
    finish, end = "abort" if last < len(ids) else "length", last
    for length in range(max(1, least), last - first + 1):
        if end_of(text_of(ids[first : first + length]), params, least):
            finish, end = "stop", first + length
            break
    tokens = np.array(ids[first:end], dtype=np.int32)
    return Generation(
        tokens, -tokens.astype(float), text_of(ids[first:end]), finish, [(0, first)], "engine-0", 0
    )  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=st.text(ALPHABET, min_size=1, max_size=20),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=2),
    patterns=st.lists(st.sampled_from(["ab+é", "日.a", "b{3}"]), max_size=1),
    cuts=st.sets(st.integers(1, 40), max_size=3),
    made=st.booleans(),
    least=st.integers(0, 12),
)
def test_an_answer_ends_where_it_would_have_ended_uncut(
    text: str, stops: list[str], patterns: list[str], cuts: set[int], made: bool, least: int
) -> None:
    ids = list(text.encode())
    params = {"stop": stops, "stop_regex": patterns, "min_new_tokens": least}
    uncut = piece(ids, 0, len(ids), params)
    places = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    pieces = []
    for first, last in zip(places, places[1:], strict=False):
        pieces.append(piece(ids, first, last, params))
        if pieces[-1].finish == "stop":
            break
    # an iteration before may have made the first piece
    before = pieces.pop(0).output_ids.tolist() if made and len(pieces) > 1 else []
    new = pieces[0]
    for each in pieces[1:]:
        new = joined(new, each)
    found = ended_at_stop(before, new, params, text_of)
    whole = [*before, *found.output_ids.tolist()]
    assert (whole, found.finish) == (uncut.output_ids.tolist(), uncut.finish)
    assert len(found.logprobs) == len(found.output_ids)
    assert all(first < max(1, len(found.output_ids)) for first, _ in found.weight_versions)


def test_without_stop_texts_nothing_is_decoded() -> None:
    def never(_: Sequence[int]) -> str:
        raise AssertionError

    new = piece([97, 98], 0, 2, {"stop": [], "stop_regex": [], "min_new_tokens": 0})
    assert ended_at_stop([97], new, {"stop": None}, never) is new
