"""The rewards that ship beside those for text and numbers, by tables of responses and scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import SchemaError

from millrace.core.hooks.protocols import RewardInput
from millrace.core.rewards.hub.dapo import dapo
from millrace.core.rewards.hub.deepscaler import deepscaler
from millrace.core.rewards.hub.f1 import f1
from millrace.core.rewards.hub.gpqa import gpqa
from millrace.core.rewards.hub.json_schema import json_schema
from millrace.core.rewards.math import math
from millrace.core.rewards.scoring import read_score

TABLE = json.loads((Path(__file__).parent / "hub_rewards.json").read_text())["cases"]
REWARDS: dict[str, Callable[..., Any]] = {
    "math": partial(math, boxed_only=True),
    "deepscaler": deepscaler,
    "dapo": dapo,
    "f1": f1,
    "gpqa": gpqa,
}
CASES = [(name.split()[0], *case) for name, cases in TABLE.items() for case in cases]
CHOICES = {"choices": ["a red fox", "a grey wolf", "a brown bear", "a white hare"]}


def scored(reward: Callable[..., Any], response: str, label: Any, **more: Any) -> float:
    sample = RewardInput(prompt="?", response=response, label=label, metadata=more.pop("metadata", {}))
    return read_score(reward(sample, **more), "it").reward


@pytest.mark.parametrize(("name", "response", "label", "score"), CASES)
def test_a_response_has_the_score_of_the_table(name: str, response: str, label: str, score: float) -> None:
    assert scored(REWARDS[name], response, label) == pytest.approx(score)


def test_the_table_has_cases_of_each_reward() -> None:
    assert {case[0] for case in CASES} == REWARDS.keys()


def test_deepscaler_takes_boxed_and_numeric_labels() -> None:
    assert scored(deepscaler, r"</think>\boxed{42}", 42) == 1
    assert scored(deepscaler, r"</think>\boxed{42}", r"\boxed{42}") == 1
    assert scored(deepscaler, r"</think>\boxed{}", "") == 0
    assert scored(deepscaler, r"</think>\boxed{42}", None) == 0
    assert scored(deepscaler, r"<think>\boxed{1}</think>\boxed{2}</think>\boxed{3}", 3) == 1


def test_dapo_reads_the_end_and_its_strict_box_the_letters() -> None:
    assert scored(dapo, "Answer: $x = 7$.", 7) == 1
    assert scored(dapo, "Answer: 34.0", "34") == 1
    assert scored(dapo, "Answer: ", "34") == -1
    assert scored(dapo, r"so \boxed{42}", "42", strict_box=True) == 1
    assert scored(dapo, r"so \boxed{42.0}", "42", strict_box=True) == -1
    assert scored(dapo, r"\boxed{42}" + "x" * 100, "42", strict_box=True) == -1
    assert dapo(RewardInput("?", "Answer: 1", "2")).parts == {"acc": 0.0}


def test_f1_takes_the_best_of_several_labels() -> None:
    assert scored(f1, "a red fox", ["wolf", "red fox"]) == 1
    assert scored(f1, "a red fox", None) == 0
    assert scored(f1, "", "fox") == 0
    assert f1(RewardInput("?", "red fox", "fox")).parts == {"precision": 0.5, "recall": 1.0}


@pytest.mark.parametrize("label", ["C", "(c)", 2, "a brown bear", "A Brown Bear "])
def test_a_choice_is_a_letter_an_index_or_its_text(label: Any) -> None:
    assert scored(gpqa, "Option (C)", label, metadata=CHOICES) == 1
    assert scored(gpqa, "It must be a brown bear.", label, metadata=CHOICES) == 1
    assert scored(gpqa, "C is correct, B is not", label, metadata=CHOICES) == 1
    assert scored(gpqa, "Answer: D", label, metadata=CHOICES) == 0
    assert scored(gpqa, "", label, metadata=CHOICES) == 0


def test_a_choice_that_the_data_do_not_have_is_the_datas_fault() -> None:
    with pytest.raises(ValueError, match="'E' is no letter of ABCD"):
        scored(gpqa, "A", "E")
    with pytest.raises(ValueError, match="'4' is no letter"):
        scored(gpqa, "A", 4, metadata=CHOICES)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ('{"age": 3}', 1),
        ('so:\n```json\n{"age": 3}\n```', 1),
        ('{"age": "3"}', 0),
        ("{}", 0),
        ("[" * 100_000, 0),
        ("three", 0),
        ("", 0),
    ],
)
def test_a_response_is_json_of_a_schema(response: str, score: float) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    assert scored(json_schema, response, None, schema=schema) == score


def test_a_schema_that_is_none_is_no_fault_of_the_response() -> None:
    with pytest.raises(SchemaError):
        scored(json_schema, "{}", None, schema={"type": "nothing"})


@pytest.mark.parametrize("name", ["deepscaler", "dapo", "f1", "gpqa"])
def test_long_responses_are_scored_in_time(name: str) -> None:
    for text in (
        "A " * 200_000,
        "answer " * 100_000,
        "Answer:" + " " * 300_000,
        r"</think>" + r"\boxed{" * 50_000,
    ):
        scored(REWARDS[name], text, "A")
