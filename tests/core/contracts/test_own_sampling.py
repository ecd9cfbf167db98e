"""What a row may say of its own sampling, and what of it reaches an engine."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.config.data import Source
from millrace.core.contracts.rows.chat_options import own_sampling
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, parse_row
from millrace.flows.preflight.first_rows import CheckedRows
from millrace.tasks.data.rows import UsablePrompt, tokenised

SOURCE = Source(name="sums", path="sums.jsonl", sampling_key="own")


def read(own: Any, source: Source = SOURCE) -> PromptRow | Quarantined:
    return parse_row({"prompt": "1+1=", "label": "2", "own": own}, 0, source)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"max_new_tokens": 8}, {"max_new_tokens": 8}),
        ({"max_new_tokens": 999}, {"max_new_tokens": 16}),
        ({"stop": ["\n"], "stop_token_ids": [7]}, {"stop": ["\n"], "stop_token_ids": [7]}),
        ({"stop_regex": ["[0-9]+ done"]}, {"stop_regex": ["[0-9]+ done"]}),
        (json.dumps({"max_new_tokens": 8}), {"max_new_tokens": 8}),
        ({"max_new_tokens": None}, {}),
        (None, {}),
        ("", {}),
    ],
)
def test_a_rows_own_parameters_are_taken_and_only_shorten(own: Any, expected: dict[str, Any]) -> None:
    row = read(own)
    assert isinstance(row, PromptRow)
    assert own_sampling(row.metadata, SOURCE.sampling_key, longest=16) == expected


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (
            {"temperature": 0.5},
            "temperature is not a row's to say, only max_new_tokens, stop, stop_token_ids, stop_regex",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, not a whole number from 1"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ({"stop": "x"}, "stop is not a list of texts"),
        ({"stop": [""]}, "stop is not a list of texts"),
        ({"min_new_tokens": 4}, "min_new_tokens is not a row's to say"),
        ({"ignore_eos": True}, "ignore_eos is not a row's to say"),
        ({"stop_regex": "x"}, "stop_regex is not a list of regular expressions"),
        ({"stop_regex": ["("]}, "stop_regex is not a list of regular expressions"),
        ({"stop_regex": ["x*"]}, "stop_regex is not a list of regular expressions"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is not a list of token ids"),
        ([8], "sampling is list, not an object"),
        ("{", "sampling are text that is not JSON"),
    ],
)
def test_a_row_that_says_something_else_is_refused_with_its_reason(own: Any, reason: str) -> None:
    row = read(own)
    assert isinstance(row, Quarantined)
    assert reason in row.reason


def test_a_source_without_the_key_takes_nothing() -> None:
    row = read({"max_new_tokens": 8}, Source(name="sums", path="sums.jsonl"))
    assert isinstance(row, PromptRow)
    assert own_sampling(row.metadata, None, longest=16) == {}
    assert own_sampling({"sampling": {"max_new_tokens": 8}}, None, longest=16) == {}


STOPS: list[
    tuple[dict[str, Any], bool, str]
] = [  # what a row says, whether texts of answers lack special tokens, the reason
    ({"stop": ["x<eos>"]}, True, "stop 'x<eos>': it holds the special token <eos>"),
    ({"stop": ["\n", "<user>:"]}, True, "it holds the special token <user>"),
    ({"stop": ["x<eos>"]}, False, ""),
    ({"stop": ["<eos>"]}, True, ""),  # the token itself ends it
    ({"stop": ["\n\n"], "stop_token_ids": [0, 81]}, True, ""),
    ({"stop_token_ids": [3, 82]}, True, "stop_token_ids names 82, and the vocabulary has 82 tokens"),
    ({"stop_token_ids": [2**40]}, False, f"stop_token_ids names {2**40}"),
    ({"max_new_tokens": 4}, True, ""),
    ({}, True, ""),
]


@pytest.mark.parametrize(("own", "skips_special", "reason"), STOPS)
def test_a_row_whose_stop_no_answer_has_is_set_aside_by_a_run_and_by_check(
    own: dict[str, Any], skips_special: bool, reason: str
) -> None:
    """Its samples failed one by one, or went on to their full length."""
    rows = [read(own), read({"stop": ["\n"]})]
    usable = [row for row in rows if isinstance(row, PromptRow)]
    usable[1] = dataclasses.replace(usable[1], row=1)
    made = build_tokenizer(tools=True)
    first, second = tokenised(SOURCE, usable, PromptTokenizer(made), 100, skips_special=skips_special)
    assert isinstance(second, UsablePrompt)
    checked = CheckedRows("data.sources.sums", SOURCE)
    checked.usable = [*usable]
    assert checked.refuse_stops(made.backend_tokenizer, skips_special=skips_special) == []
    if not reason:
        assert isinstance(first, UsablePrompt)
        assert checked.usable == usable
        return
    assert isinstance(first, Quarantined)
    assert reason in first.reason
    assert checked.refused == [first]
    assert checked.usable == usable[1:]


def test_a_source_whose_rows_all_have_such_a_stop_is_a_problem() -> None:
    checked = CheckedRows("data.sources.sums", SOURCE)
    row = read({"stop": ["x<eos>"]})
    assert isinstance(row, PromptRow)
    checked.usable = [row]
    (problem,) = checked.refuse_stops(build_tokenizer().backend_tokenizer, skips_special=True)
    assert "holds the special token <eos>" in problem.reason
    assert "sampling_key" in problem.remedy
