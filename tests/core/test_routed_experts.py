"""Routed experts from an engine's answer to a batch: the same numbers come back, and what is none of the model's is refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.families.routed_experts import RoutedRows, RoutingFormat

FORM = RoutingFormat(layers=4, expert_layers=(1, 3), experts=8, used=3)


@st.composite
def forms(draw: st.DrawFn) -> RoutingFormat:
    layers = draw(st.integers(1, 5))
    mixtures = draw(st.sets(st.integers(0, layers - 1), min_size=1))
    experts = draw(st.sampled_from([2, 8, 255, 256, 257, 384]))
    return RoutingFormat(layers, tuple(sorted(mixtures)), experts, draw(st.integers(1, min(4, experts))))


def drawn(form: RoutingFormat, rows: int, seed: int) -> np.ndarray:
    chosen = np.random.default_rng(seed).random((rows, len(form.expert_layers), form.experts))
    found: np.ndarray = chosen.argsort(-1)[..., : form.used]
    return found


@given(forms(), st.integers(0, 20), st.integers(0, 99), st.data())
def test_rows_come_back_as_they_were_sent_however_they_are_joined(
    form: RoutingFormat, count: int, seed: int, data: st.DataObject
) -> None:
    rows = drawn(form, count, seed)
    whole = form.from_engine(form.to_engine([*rows]), count)
    assert (whole.count, whole.width) == (count, rows[:1].size * form.dtype.itemsize or form.width)
    cut = data.draw(st.integers(0, count))
    parts = [form.from_engine(form.to_engine([*part]), len(part)) for part in (rows[:cut], rows[cut:])]
    assert parts[0].then(parts[1]).data == whole.data
    assert (whole.without_last(count - cut).data, whole.last(count - cut).data) == (
        parts[0].data,
        parts[1].data,
    )
    assert (form.read(whole.data, count + 1, count) == rows).all()
    assert form.dtype.itemsize == (1 if form.experts <= 256 else 2)


def test_more_rows_than_there_are_can_be_left_out() -> None:
    rows = RoutedRows(2, b"abcd")
    assert (rows.last(5).data, rows.without_last(5).data) == (b"abcd", b"")


def wire(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()


def full(rows: int) -> np.ndarray:
    numbers = np.zeros((rows, FORM.layers, FORM.used), np.int64)
    numbers[:, list(FORM.expert_layers)] = drawn(FORM, rows, 0)
    return numbers


def changed(value: int, layer: int = 1) -> np.ndarray:
    numbers = full(5)
    numbers[2, layer, 0] = value
    return numbers


ANSWERS = {
    "none": (None, "the answer has no routed experts"),
    "a list": ([1, 2], "the answer has no routed experts"),
    "no base64": ("*", "are not base64"),
    "a row too few": (wire(full(4)), "have 192 bytes; 5 rows of 4 layers, 3 experts each, have 240"),
    "the whole for a part": (wire(full(9)), "432 bytes"),
    "half a number": (wire(full(5))[:-4], "237 bytes"),
    "an expert too many": (wire(changed(8)), "row 2 has expert 8, and a layer has 8"),
    "a negative one": (wire(changed(-1)), "row 2 has expert -1"),
    "a dense layer's": (wire(changed(9, layer=0)), "row 2 has expert 9"),
    "one twice": (wire(changed(int(full(5)[2, 1, 1]))), "in layer 1, one of them twice"),
    "never filled": (wire(np.zeros((5, FORM.layers, FORM.used))), r"the experts \[0, 0, 0\] in layer 1"),
}


@pytest.mark.parametrize(("text", "reason"), ANSWERS.values(), ids=list(ANSWERS))
def test_an_answer_that_is_no_routing_of_the_model_is_refused(text: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        FORM.from_engine(text, 5)


STORED = {
    "half a row": (b"\0" * 7, 6, 0, "7 bytes are no rows of 6 bytes"),
    "too few": (b"\0" * 12, 6, 3, "2 rows for 6 tokens, of which 3 need one"),
    "one for the last token": (b"\0" * 36, 6, 3, "6 rows for 6 tokens"),
    "another model's": (b"\x08" * 12, 6, 2, r"row 0 has expert 8"),
}


@pytest.mark.parametrize(("data", "tokens", "needed", "reason"), STORED.values(), ids=list(STORED))
def test_stored_rows_that_do_not_fit_are_refused(data: bytes, tokens: int, needed: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        FORM.read(data, tokens, needed)
