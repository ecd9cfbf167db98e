"""Answers read with arrays for their tokens hold what Python's own reading of the same JSON gives, value for value."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.connectors.engines.client import GenerateRequest
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.engines.sglang.wire import answer_body
from millrace.connectors.engines.sglang.wire.answer_body import read_answer
from millrace.core.contracts import schema
from millrace.tasks.generation.answers import generated_sample
from millrace.tasks.generation.single_samples import Answer
from tests.support.stored_samples import drawn_group

REQUEST = GenerateRequest(input_ids=[1, 2], sampling_params={}, rid="r", progress_timeout_s=1.0)
KEYS = ['"output_token_logprobs":[[1,2,null]]', '{"output_ids":[1]}', "\\", '"', "]]", "é\n"]
TEXTS = st.text() | st.sampled_from(KEYS) | st.sampled_from(["output_ids", "output_token_logprobs"])
LOGPROBS = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32) | st.floats(-99, 0)
TOKENS = st.lists(st.tuples(LOGPROBS, st.integers(0, 2**31 - 1)), max_size=40)


def answer(text: str, tokens: list[tuple[float, int]], spans: list[dict[str, int]]) -> dict[str, Any]:
    return {
        "text": text,
        "output_ids": [token for _, token in tokens],
        "meta_info": {
            "id": text,
            "finish_reason": {"type": "length", "length": len(tokens)},
            "weight_version": "3",
            "weight_versions": spans,
            "output_token_logprobs": [[value, token, None] for value, token in tokens],
            "cached_tokens": 2,
        },
    }


def spans_of(count: int, cuts: list[int]) -> list[dict[str, int]]:
    starts = [0, *sorted({cut % count for cut in cuts} - {0})] if count else []
    return [{"start": start, "version": 3 + at} for at, start in enumerate(starts)]


AS_COLUMNS, AS_ONE_LIST = 0, 1 << 30  # bytes from which pairs are read as columns


@settings(deadline=None)
@given(
    TEXTS,
    TOKENS,
    st.lists(st.integers(0, 99), max_size=3),
    st.booleans(),
    st.sampled_from([AS_COLUMNS, AS_ONE_LIST]),
)
def test_a_row_of_an_answer_is_stored_as_plain_reading_of_its_json_stores_it(
    text: str, tokens: list[tuple[float, int]], cuts: list[int], spaced: bool, long: int
) -> None:
    """Over all columns, types among them; texts that look like the keys, no tokens, several weight versions."""
    sent = answer(text, tokens, spans_of(len(tokens), cuts))
    body = json.dumps(sent).encode() if spaced else orjson.dumps(sent)
    client, group = SglangClient("http://nowhere", "engine-0"), drawn_group(0)
    with patch.object(answer_body, "LONG", long):
        made = client._generation(read_answer(body), REQUEST, None)
    row = generated_sample(group, 1, 7, Answer(made, None, 1.0, 2.0))
    plain = json.loads(body)
    pairs = plain["meta_info"]["output_token_logprobs"]
    spans = plain["meta_info"]["weight_versions"] or [{"start": 0, "version": 3}]
    expected = {
        "sample_id": "g0-0001",
        **{
            name: getattr(group, name)
            for name in ("group_id", "prompt_id", "iteration", "source", "prompt", "label", "metadata")
        },
        "index": 1,
        "tokens": [1, 2, *(token for _, token, _ in pairs)],
        "response_length": len(pairs),
        "response": plain["text"],
        "loss_mask": [1] * len(pairs),
        "rollout_logprobs": [value for value, _, _ in pairs],
        "policy_versions": [
            {"first_token": span["start"], "version": int(span["version"])} for span in spans
        ],
        "engine_id": "engine-0",
        "seed": 7,
        "turns": 1,
        "status": "truncated",
        "timings": [("started", 1.0), ("generate_s", 2.0)],
    }
    table = schema.to_table([row], "rollouts")
    assert table.equals(
        pa.Table.from_pylist([expected], schema=schema.schema("rollouts")), check_metadata=True
    )


def test_rows_with_arrays_and_rows_with_lists_make_one_table() -> None:
    """Samples of several turns hold lists, and one that failed holds nothing."""
    group = drawn_group(0)
    client = SglangClient("http://nowhere", "engine-0")
    made = client._generation(
        read_answer(orjson.dumps(answer("a", [(-0.5, 9), (-0.1, 8)], []))), REQUEST, None
    )
    arrays = generated_sample(group, 0, 7, Answer(made, None, 0.0, 0.0))
    failed = generated_sample(group, 1, 7, Answer(None, "engine-0: died", 0.0, 0.0))
    lists = type(arrays)(
        **{
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name in schema.SCHEMAS["rollouts"].names
            for value in [getattr(arrays, name)]
        }
    )
    table = schema.to_table([arrays, failed, lists], "rollouts")
    assert table.slice(0, 1).equals(table.slice(2, 1))
    assert table.column("tokens").to_pylist() == [[1, 2, 9, 8], [1, 2], [1, 2, 9, 8]]
    assert table.column("rollout_logprobs").to_pylist()[1] == []


@pytest.mark.parametrize(
    "pairs",
    [
        "[[-0.5,7],[1,2,3,4]]",
        "[[-0.5,7,null]",
        "[[-0.5,7,null] 3]",
        "[[-0.5,null,null]]",
        "[[-0.5,7]]",
        '[[-0.5,7,"a"]]',
        "[[-0.5,7,null],[1,null]]",
        "[[-0.5,9999999999,null]]",
        "[[-0.5,7,null",
    ],
)
@pytest.mark.parametrize("long", [AS_COLUMNS, AS_ONE_LIST])
def test_log_probabilities_of_another_form_are_refused(
    monkeypatch: pytest.MonkeyPatch, pairs: str, long: int
) -> None:
    monkeypatch.setattr(answer_body, "LONG", long)
    with pytest.raises(ValueError, match="log-probabilit"):
        read_answer(b'{"text":"","meta_info":{"output_token_logprobs":' + pairs.encode() + b"}}")


@pytest.mark.parametrize("pairs", ["", ',"output_token_logprobs":[]', ',"output_token_logprobs":null'])
def test_an_answer_without_tokens_has_none(pairs: str) -> None:
    found = read_answer(b'{"text":"","meta_info":{"id":"r"' + pairs.encode() + b"}}")
    assert len(found["meta_info"]["output_token_logprobs"].ids) == 0


@pytest.mark.parametrize("long", [AS_COLUMNS, AS_ONE_LIST])
def test_a_log_probability_that_is_null_is_seen_as_no_number(
    monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    monkeypatch.setattr(answer_body, "LONG", long)
    found = read_answer(b'{"meta_info":{"output_token_logprobs":[[-1,7,null],[null,8,null]]}}')
    assert np.isnan(found["meta_info"]["output_token_logprobs"].logprobs).tolist() == [False, True]


@pytest.mark.parametrize(
    "pair",
    [
        "[-1,7a,null]",
        "[-1,,null]",
        "[-1,7,nulL]",
        "[-1x,7,null]",
        "[-1,7,null,8]",
        "[-1,7.5,null]",
        '[-1,7,"]"]',
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_pair_of_another_form_among_good_ones_is_not_taken_for_one(pair: str, place: int) -> None:
    """Both readers tell the same pairs apart: neither trusts the number of commas alone."""
    pairs = ["[-0.5,3,null]", "[-0.25,4,null]"]
    pairs.insert(place, pair)
    text = ",".join(pairs)
    body = b'{"meta_info":' + text.encode()
    assert answer_body._read_columns(body, len(body) - len(text) + 1, len(body) - 1) is None


def test_long_answers_are_read_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_body, "_read_flat", None)  # which makes an object of each number
    tokens = [(-at / 7, at) for at in range(answer_body.LONG // 8)]
    found = read_answer(orjson.dumps(answer("a", tokens, [])))["meta_info"]["output_token_logprobs"]
    assert list(zip(found.logprobs.tolist(), found.ids.tolist(), strict=True)) == tokens
