"""Word problems: they differ, none is held out and trained on, and each answer is right."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from millrace import RewardInput
from millrace.core.rewards.math import math
from millrace.flows.pretrained import HELD_OUT, TRAIN, problems, write_problems

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
