"""IFEval's reward: rows in its public format, and what is wrong with others."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.hub.ifeval import ifeval

INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_it = pytest.mark.skipif(not INSTALLED, reason="pip install 'millrace[ifeval]'")
FEW_WORDS = ("length_constraints:number_words", {"relation": "less than", "num_words": 5, "keywords": None})
NO_COMMA = ("punctuation:no_comma", {})
TITLE = ("detectable_format:title", None)


def scored(response: str, *instructions: tuple[str, Any], **options: Any) -> RewardResult:
    metadata = {
        "instruction_id_list": [name for name, _ in instructions],
        "kwargs": [kwargs for _, kwargs in instructions],
    }
    return ifeval(RewardInput("Write something.", response, metadata=metadata), **options)


@needs_it
@pytest.mark.parametrize(
    ("response", "instructions", "strict", "loose", "share"),
    [
        ("Spring", [FEW_WORDS], 1, 1, 1),
        ("one two three four five", [FEW_WORDS], 0, 0, 0),
        ("<think>one, two three four five</think>Spring", [FEW_WORDS, NO_COMMA], 1, 1, 1),
        ("Spring, at last", [FEW_WORDS, NO_COMMA], 0, 0, 0.5),
        ("Sure, here it is:\n<<Spring>>", [NO_COMMA, TITLE], 0, 1, 0.5),
        ("", [NO_COMMA], 0, 0, 0),
    ],
)
def test_a_response_is_scored_by_the_instructions_it_follows(
    response: str, instructions: list[tuple[str, Any]], strict: float, loose: float, share: float
) -> None:
    parts = {"strict": strict, "loose": loose, "share": share}
    for score, reward in parts.items():
        assert scored(response, *instructions, score=score) == RewardResult(reward, parts)


@needs_it
@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "metadata of the row: instruction_id_list and kwargs are no lists"),
        ({"instruction_id_list": ["a"], "kwargs": []}, "are no lists of one length"),
        ({"instruction_id_list": ["a"], "kwargs": [{}]}, "'a' is no instruction of IFEval"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        ifeval(RewardInput("?", "x", metadata=metadata))


@pytest.mark.skipif(INSTALLED, reason="the extra is installed")
def test_without_the_extra_it_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"ifeval: it needs lm-evaluation-harness") as caught:
        scored("Spring", NO_COMMA)
    assert "millrace[ifeval]" in caught.value.remedy


def test_an_unknown_score_is_named() -> None:
    with pytest.raises(ConfigError, match="score = most is not a choice"):
        scored("x", NO_COMMA, score="most")
