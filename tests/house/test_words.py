"""The product's docstrings and comments are plain; the counter finds each construction, and leaves plain sentences alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.house.source import SourceFile, read_source
from tests.house.words import CONSTRUCTIONS, MOST_PER_10000, counted, found_in

EXAMPLES = {
    "those that": ["Keep those that are full.", "Take one that is free."],
    "where for if": ["Zero where there is none.", "Where it is not set, the default."],
    "begin": ["A run begins.", "It began again."],
    "opens with Of": ["Of the parts, the first.", "Read it. Of each row the name."],
    "of its own": ["A process of its own.", "A file of yours."],
    "in place of": ["A name in place of a path.", "It goes on all the same.", "The text as it is."],
    "whoever": ["Whoever asks.", "For whatever reason."],
}
PLAIN = [
    "Start where you stopped.",
    "One of the ranks.",
    "The rows of the table.",
    "As it is now in use.",
    "Most of the time.",
]


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_each_construction_is_found(name: str) -> None:
    for text in EXAMPLES[name]:
        assert [each.construction for each in found_in("a.py", 1, text)] == [name]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_sentences_are_left_alone(text: str) -> None:
    assert list(found_in("a.py", 1, text)) == []


def test_docstrings_and_comments_of_the_product_are_read() -> None:
    text = '"""Start.\n\nOf the parts, one."""\n\nx = 1  # begin\ny = "begins"\n'
    words, found = counted([SourceFile("core/a.py", text), SourceFile("tests/a.py", text)])
    assert words == 6
    assert [(each.line, each.construction) for each in sorted(found)] == [(3, "opens with Of"), (5, "begin")]


def test_docstrings_and_comments_of_the_product_are_plain() -> None:
    words, found = counted(read_source(Path(__file__).parents[2]))
    most = MOST_PER_10000 * words / 10_000
    counts = Counter(each.construction for each in found)
    too_many = {name: count for name, count in counts.items() if count > most}
    assert not too_many, "\n".join(str(each) for each in sorted(found) if each.construction in too_many)
