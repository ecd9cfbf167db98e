"""What each reward that ships does with a long text grows with the text's length, and no faster: a slow text scores.

gpqa took 33 s for 32,000 spaces, twice the time in which a run waits for a score.
"""

from __future__ import annotations

import ast
import importlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.hub import ifbench, ifeval
from millrace.core.rewards.hub.ifeval import LONGEST, SCORES, answer_of, follows_nothing
from millrace.core.rewards.math import equal

SIZE, SMALLER = 16_000, 2_000  # characters; what reads the end of a text alone reads more than these
FREE = 0.5  # CPU seconds for SIZE of them: a text below is not looked at further
GROWTH = 2 * SIZE / SMALLER  # of the work, at most, where it is more; the square would be 64
SHORT = 400  # characters of an answer that math reads

REWARDS: dict[str, tuple[dict[str, Any], Any]] = {  # options, and the label
    "text:exact_match": ({}, "7"),
    "text:contains": ({}, "7"),
    "number:arithmetic": ({}, 7),
    "math:math": ({}, "7"),
    "format:boxed": ({}, None),
    "format:think_answer": ({}, None),
    "format:finished": ({}, None),
    "hub.deepscaler:deepscaler": ({}, "7"),
    "hub.dapo:dapo": ({}, "7"),
    "hub.f1:f1": ({}, "a man"),
    "hub.gpqa:gpqa": ({}, "A"),
    "hub.json_schema:json_schema": ({"schema": {"type": "object"}}, None),
}
ELSEWHERE = {
    "format:matches": "its expression is the user's: reward.timeout_s ends a slow one",
    "format:weighted": "its parts are other rewards",
    "hub.ifeval:ifeval": "reads no more than LONGEST characters, below",
    "hub.ifbench:ifbench": "reads no more than LONGEST characters, below",
}
UNITS = [
    " ", "\n", "\t", "\u00a0", "a ", "A ", "answer ", ", ", ", A", "  ,", "(", ")", "[", "{", "}", "\\boxed{", "\\boxed{}", "$",
    "1", "1,", "1,000,", "1.", "-", "1/", "1e", "1 ", "\\frac", "\\frac{1}", "\\text{", "\\", "<think>", "</think>", "<answer>",
    "```", "```\n", "```json\n", "not ", "rule ", "x_", "^", "1 or ", "Answer:", "\u00b2", "\u0660", "(a)", "answer a.", "'",
    "[1,", '{"a":', "2^", "between ", "% ",
]  # fmt: skip
AROUND = [("", ""), ("answer", "}"), (", A", "x"), ("</think>\\boxed{", "}"), ("```json\n", "\n```")]


def score_of(reward: str) -> Any:
    module, _, name = reward.partition(":")
    return getattr(importlib.import_module(f"millrace.core.rewards.{module}"), name)


def text_of(unit: str, around: tuple[str, str], size: int) -> str:
    return around[0] + unit * (size // len(unit)) + around[1]


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Of one call; the least of three where one is slow, which a collection of garbage may have been."""

    def once() -> float:
        started = time.process_time()
        call()
        return time.process_time() - started

    return taken if (taken := once()) <= FREE else min(taken, once(), once())


def seconds(reward: str, text: str) -> float:
    options, label = REWARDS[reward]
    return cpu_seconds(partial(score_of(reward), RewardInput("?", text, label=label), **options))


@pytest.mark.parametrize("reward", REWARDS)
def test_work_grows_no_faster_than_the_text(reward: str) -> None:
    seconds(reward, "\\boxed{x^2}")  # loads what it needs
    slow = {}
    for unit in UNITS:
        for around in AROUND:
            taken = seconds(reward, text_of(unit, around, SIZE))
            if taken > FREE:
                growth = taken / seconds(reward, text_of(unit, around, SMALLER))
                if growth > GROWTH:
                    slow[unit, around] = (taken, growth)
    assert slow == {}


def test_an_answer_that_math_takes_apart_is_short_and_none_is_slow() -> None:
    equal("x^2", "x\\cdot x")
    slow = {}
    for unit in UNITS:
        for other in ("", "x", *UNITS[::8]):
            text = ((unit + other) * SHORT)[:SHORT]
            if (taken := cpu_seconds(partial(equal, text, "7", symbolic=False))) > FREE:
                slow[text[:20]] = taken
    assert slow == {}


@pytest.mark.parametrize("module", [ifeval, ifbench])
def test_responses_that_are_too_long_for_checks_of_others_are_not_checked(module: Any) -> None:
    assert answer_of(RewardInput("?", "thought" * LONGEST + "</think>" + "x" * LONGEST)) == "x" * LONGEST
    assert answer_of(RewardInput("?", "x" * (LONGEST + 1))) is None
    for score in SCORES:
        assert follows_nothing(score) == RewardResult(0.0, dict.fromkeys(SCORES, 0.0))
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Call)
    }
    assert {"answer_of", "follows_nothing"} <= calls


def test_every_reward_of_a_text_that_ships_has_a_row() -> None:
    root = Path(millrace.__file__).parent / "core" / "rewards"
    found = set()
    for path in root.rglob("*.py"):
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.args.args:
                kind, given = node.args.args[0].annotation, node.returns
                scores = given is not None and ast.unparse(given) in ("float", "RewardResult")
                if kind is not None and ast.unparse(kind) == "RewardInput" and scores:
                    found.add(f"{module}:{node.name}")
    assert found == {*REWARDS, *ELSEWHERE}
