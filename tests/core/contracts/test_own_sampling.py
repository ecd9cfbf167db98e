"""What a row may say of its own sampling, and what of it reaches an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.core.config.data import Source
from millrace.core.contracts.rows.own_sampling import own_sampling
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, parse_row

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
