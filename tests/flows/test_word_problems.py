"""Word problems and sums: they differ, none is held out and trained on, and each answer is right."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from millrace import RewardInput
from millrace.core.rewards.math import math
from millrace.core.rewards.text import exact_match
from millrace.flows.pretrained import (
    HELD_OUT,
    LARGEST_TERM,
    SHOWN,
    SUMS_HELD_OUT,
    TRAIN,
    problems,
    sums,
    write_problems,
    write_sums,
)

ANSWERS = {  # by what a problem says: its answer from the numbers in it, in their order
    "gives": lambda a, b: a + b,
    "of them to": lambda a, b: a - b,
    "boxes": lambda a, b: a * b,
    "times as many": lambda a, b: a * (b + 1),
    "equally": lambda a, b: a // b,
    "finds": lambda a, b, c: a + b - c,
}


@pytest.mark.parametrize("largest", [9, 30])
def test_every_answer_is_what_the_problem_says(largest: int) -> None:
    kinds = set()
    for row in islice(problems(random.Random(3), largest), 500):
        text = row["prompt"]
        kind = "of them to" if "of them to" in text else next(each for each in ANSWERS if each in text)
        kinds.add(kind)
        assert int(row["label"]) == ANSWERS[kind](*map(int, re.findall(r"\d+", text))), text
        assert int(row["label"]) >= 1
        assert math(RewardInput(text, f"\\boxed{{{row['label']}}}", row["label"])).reward == 1.0
    assert kinds == set(ANSWERS)


def test_the_files_share_no_problem_and_are_written_once(tmp_path: Path) -> None:
    write_problems(tmp_path, 30, seed=1)
    texts = [path.read_text() for path in sorted(tmp_path.iterdir())]
    held_out, train = ([json.loads(line)["prompt"] for line in text.splitlines()] for text in texts)
    assert (len(set(held_out)), len(set(train))) == (HELD_OUT, TRAIN)
    assert not set(held_out) & set(train)
    write_problems(tmp_path, 9, seed=2)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == texts


def test_every_sum_is_right_and_shows_what_is_not_asked() -> None:
    rows, asked = sums(random.Random(3)), set()
    for row in rows:
        *shown, question = row["prompt"].split("\n")
        a, b = map(int, re.fullmatch(r"(\d+) \+ (\d+) =", question).groups())  # type: ignore[union-attr]
        assert int(row["label"]) == a + b
        assert exact_match(RewardInput(row["prompt"], f" {a + b}\n", row["label"])).reward == 1.0
        assert [tuple(map(int, re.findall(r"\d+", line))) for line in shown] == [(*s, sum(s)) for s in SHOWN]
        asked.add((a, b))
    assert len(asked) == len(rows) == (LARGEST_TERM - 1) ** 2 - len(SHOWN)
    assert not asked & set(SHOWN)


def test_the_files_of_sums_share_no_sum_and_are_written_once(tmp_path: Path) -> None:
    write_sums(tmp_path, seed=1)
    files = [tmp_path / "sums_held_out.jsonl", tmp_path / "sums_train.jsonl"]
    assert sorted(tmp_path.iterdir()) == files
    texts = [path.read_text() for path in files]
    held_out, train = ([json.loads(line)["prompt"] for line in text.splitlines()] for text in texts)
    assert len(held_out) == SUMS_HELD_OUT
    assert sorted([*held_out, *train]) == sorted(row["prompt"] for row in sums(random.Random(2)))
    assert not set(held_out) & set(train)
    write_sums(tmp_path, seed=2)
    assert [path.read_text() for path in files] == texts
