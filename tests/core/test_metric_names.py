"""Names of metrics with texts from data in them: every one can be kept, and two texts never become one name."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.core.metric_names import LONGEST, name_part, portable_name
from tests.support.odd_texts import ODD_TEXTS

TAKEN = re.compile(r"[A-Za-z0-9_.\-:/ ]+")
texts = (
    st.text(st.characters(codec=None), max_size=60)
    | st.text("./%:2Fef_ &", max_size=8)
    | st.sampled_from(ODD_TEXTS)
)


def assert_taken(name: str) -> None:
    assert TAKEN.fullmatch(name), name
    assert len(name) <= LONGEST
    assert not {"", ".", ".."} & set(name.split("/")), (
        name
    )  # as those of a path that may be written otherwise


@given(texts, texts)
@example("a/b", "a%2Fb")
@example(":26:", "&")
@example("", ":empty:")
@example("&" * 100, "&" * 101)
def test_two_texts_stay_two_in_a_name_that_every_tracker_takes(one: str, other: str) -> None:
    names = [portable_name(f"eval/test/{name_part(text)}/reward_mean") for text in (one, other)]
    for name in names:
        assert_taken(name)
    assert (names[0] == names[1]) == (name_part(one) == name_part(other))


@given(texts, texts)
def test_any_two_names_stay_two(one: str, other: str) -> None:
    made = portable_name(one), portable_name(other)
    assert_taken(made[0])
    same = one.encode("utf-8", "backslashreplace") == other.encode("utf-8", "backslashreplace")
    assert (made[0] == made[1]) == same


@given(texts)
def test_a_part_of_a_name_is_one_part(text: str) -> None:
    part = name_part(text)
    assert part
    assert "/" not in part
    assert part not in {".", ".."}


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_two_parts_are_equal_for_equal_texts_alone(one: str, other: str) -> None:
    assert (name_part(one) == name_part(other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "part", "name"),
    [
        ("Algebra", "Algebra", "Algebra"),
        ("Counting & Probability", "Counting & Probability", "Counting :26: Probability"),
        ("a/b", "a%2Fb", "a:25:2Fb"),
        ("", "%", ":25:"),
        ("..", "%%2E%2E", ":25::25:2E:25:2E"),
        ("日", "日", ":65e5:"),
        ("100%", "100%25", "100:25:25"),
        ("a\nb", "a%0Ab", "a:25:0Ab"),
        ("v1.5-x_y", "v1.5-x_y", "v1.5-x_y"),
        ("half \ud83d", "half \\ud83d", "half :5c:ud83d"),
    ],
)
def test_names_can_be_read(text: str, part: str, name: str) -> None:
    assert (name_part(text), portable_name(name_part(text))) == (part, name)


def test_names_without_data_stay_as_they_were() -> None:
    for name in ("reward/mean", "train/logprob_gap_mean", "eval/held-out.1/pass_at_4", "time/rollout_s"):
        assert portable_name(name) == name
    assert portable_name("reward/pass@8") == "reward/pass_at_8"
    assert portable_name("a//b") == "a/:empty:/b"
    assert portable_name("../x") == ":2e::2e:/x"
