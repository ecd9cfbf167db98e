"""What a careful human gives for answers of many kinds, by reward and by kind: tables of response, label and score.

A wrong, hedged, or other answer never has the full score. A kind is added as a row with at least ten answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.core.evaluation import EvaluatedAnswer, majority
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards import format, text
from millrace.core.rewards.code.answer import last_code_block
from millrace.core.rewards.hub.dapo import dapo
from millrace.core.rewards.hub.deepscaler import deepscaler
from millrace.core.rewards.hub.f1 import f1
from millrace.core.rewards.hub.gpqa import gpqa
from millrace.core.rewards.math import equal, last_boxed, math, normal_form
from millrace.core.rewards.number import arithmetic
from millrace.core.rewards.units import COUNTED, NAMES, NEVER_COUNTED, WORTH

HERE = Path(__file__).parent
BY_REWARD: dict[str, list[list[Any]]] = json.loads((HERE / "answers_by_reward.json").read_text())
BY_KIND: dict[str, list[list[Any]]] = json.loads((HERE / "answers_by_kind.json").read_text())
REWARDS: dict[str, Callable[..., RewardResult]] = {
    "math": math,
    "arithmetic": arithmetic,
    "gpqa": gpqa,
    "dapo": dapo,
}
LENGTH, SECONDS = (
    32_000,
    1.0,
)  # characters of a hostile text, and CPU time for it: a quadratic search takes minutes
HOSTILE = [
    *(" ", "\t", "\n", "{", "}", "\\boxed{", "\\boxed{}", "\\boxed{5} ", "1", "1,", "1,111", "1/", "1 ", "-", "−", "½", "１", "²"),
    *("\\frac{1}{", "\\frac{", "\\text{", "\\sqrt{", "\\pm", "^", "\\", "$", "e", "((", "5 or ", "5 million ", "not ", "not B but "),
    *("(A) ", "A, ", "A or B ", "Answer: ", "answer is ", "is the answer ", "rule ", "Vitamin ", "```\n", "~~~\n", "`"),
    *("<think>", "</think>", "<answer>", "</think><answer>", "、"),
]  # fmt: skip


def scored(reward: str, row: list[Any]) -> float:
    metadata = {"choices": row[3]} if len(row) > 3 else {}
    sample = RewardInput(prompt="?", response=row[0], label=row[1], metadata=metadata)
    return REWARDS[reward](sample).reward


@pytest.mark.parametrize("reward", BY_REWARD)
def test_each_reward_scores_as_a_careful_human(reward: str) -> None:
    rows = BY_REWARD[reward]
    assert len(rows) >= 10
    assert [[*row[:2], scored(reward, row)] for row in rows] == [row[:3] for row in rows]


@pytest.mark.parametrize("kind", BY_KIND)
def test_each_kind_of_answer(kind: str) -> None:
    rows = BY_KIND[kind]
    assert len(rows) >= 10
    assert [[*row[:2], scored("math", row)] for row in rows] == rows


@pytest.mark.parametrize("kind", BY_KIND)
def test_answers_are_equal_in_either_order(kind: str) -> None:
    boxed = [(box, label) for response, label, _ in BY_KIND[kind] if (box := last_boxed(response))]
    assert [pair for pair in boxed if equal(*pair) != equal(*reversed(pair))] == []


def test_right_answers_of_one_label_are_one_vote() -> None:
    for response, label, score in BY_REWARD["math"]:
        answer = math(RewardInput(prompt="?", response=response, label=label)).answer
        assert (answer == normal_form(last_boxed(label) or label.rpartition("####")[2])) >= score


@pytest.mark.parametrize(
    "spellings",
    [
        (r"\frac12", "0.5", "1/2", "½", r"\dfrac{1}{2}", "2/4", ".50"),
        ("1+x", "x+1", r"\left(x+1\right)"),
        ("3,2,1", "1, 2, 3", r"3 \text{ and } 2 \text{ and } 1"),
        (r"\sqrt{8}", r"2\sqrt{2}", r"2\sqrt2"),
        ("1,234", "1234", "1234.0", r"1\,234"),
        ("Tuesday", r"\text{Tuesday}", "tuesday."),
        ("5 million", "5000000", r"5\times 10^6"),
        ("5", "5.0", r"5\text{ apples}"),
        ("May 4", "4th of May"),
        ("(B)", r"\textbf{(B)}", "(b)"),
    ],
)
def test_spellings_of_one_answer_are_one_vote(spellings: tuple[str, ...]) -> None:
    assert len({normal_form(spelling) for spelling in spellings}) == 1


VOTES: list[tuple[str, str, list[str], float]] = [
    ("gpqa", "B", ["The answer is B.", "Answer: B", "I choose (B)", "The answer is C."], 1),
    ("gpqa", "B", ["B, as 3 > 2", "B, for x = 7", "C, since 3 > 2"], 1),
    ("gpqa", "B", ["C because 1", "C because 2", "B because 3"], 0),
    ("gpqa", "B", ["B or C", "either B or C", "B"], 1),
    ("math", "0.5", [r"\boxed{\frac12}", r"\boxed{0.5}", r"\boxed{3}"], 1),
    ("math", "0.5", [r"\boxed{\frac12}", r"\boxed{0.5}", r"\boxed{3}", r"\boxed{3}"], 0.5),
    ("math", "x+1", [r"\boxed{1+x}", r"\boxed{x+1}", r"\boxed{x}"], 1),
    ("math", "7", [r"\boxed{x+1}", r"\boxed{1+x}", r"\boxed{7}"], 0),
    ("math", "7", ["none", "none", r"\boxed{7}"], 1),
    ("arithmetic", "7", ["it is 7.0", "7", "8", "8", "007"], 1),
    ("dapo", "7", ["Answer: 7", "Answer: $7$", "Answer: 8"], 1),
]


@pytest.mark.parametrize(("reward", "label", "responses", "expected"), VOTES)
def test_the_majority_is_of_what_the_reward_found(
    reward: str, label: str, responses: list[str], expected: float
) -> None:
    samples = [RewardInput(prompt="?", response=response, label=label) for response in responses]
    results = [REWARDS[reward](sample) for sample in samples]
    assert (
        majority([EvaluatedAnswer("p", result.reward, result.answer) for result in results], 1.0) == expected
    )


def test_what_is_counted_is_named_by_the_prompt() -> None:
    sample = RewardInput(prompt="How many zorbs?", response=r"\boxed{5\text{ zorbs}}", label="5")
    assert math(sample).reward == 1
    other = RewardInput(prompt="How many million or so?", response=r"\boxed{5\text{ million}}", label="5")
    assert math(other).reward == 0


def test_no_word_that_changes_a_value_is_a_unit() -> None:
    assert set(WORTH).isdisjoint(NAMES)
    assert set(WORTH) <= NEVER_COUNTED
    assert set(COUNTED).isdisjoint(WORTH)


CALLS: dict[str, Callable[[str], object]] = {
    "math": lambda text_: math(RewardInput("?", text_, "7")),
    "a prompt": lambda text_: math(RewardInput(text_, r"\boxed{5 cats}", "5")),
    "a label": lambda text_: math(RewardInput("?", "5", text_ + "1")),
    "arithmetic": lambda text_: arithmetic(RewardInput("?", text_, "7")),
    "gpqa": lambda text_: gpqa(RewardInput("?", text_, "B", {"choices": ["a b", "c d", "e", "f"]})),
    "dapo": lambda text_: dapo(RewardInput("?", text_, "7")),
    "deepscaler": lambda text_: deepscaler(RewardInput("?", text_, "7")),
    "f1": lambda text_: f1(RewardInput("?", text_, "7")),
    "boxed": lambda text_: format.boxed(RewardInput("?", text_)),
    "think_answer": lambda text_: format.think_answer(RewardInput("?", text_)),
    "exact_match": lambda text_: text.exact_match(RewardInput("?", text_, "7")),
    "contains": lambda text_: text.contains(RewardInput("?", text_, "7")),
    "code": last_code_block,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_text_takes_a_reward_long(name: str) -> None:
    equal("x+1", "1+x")  # loads the library
    slow = []
    for hostile in HOSTILE:
        for before, after in (("</think>", "x"), ("\\boxed{5", "}"), ("The answer is ", "B")):
            given = before + hostile * (LENGTH // len(hostile)) + after
            started = time.process_time()
            CALLS[name](given)
            if time.process_time() - started > SECONDS:
                slow.append((hostile, before))
    assert slow == []
