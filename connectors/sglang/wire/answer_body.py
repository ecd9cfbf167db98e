"""The JSON of an answer to /generate, with its tokens as arrays.

Owns how the pairs [log-probability, token id, null] are read without a list a token. Knows nothing of requests or engines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

# a quoted name before a colon is a key: in a text its quotes would be escaped
PAIRS = re.compile(rb'"output_token_logprobs"\s*:\s*\[\s*\[')
PAIRS_END = re.compile(rb"\]\s*\]")
IDS = re.compile(rb'"output_ids"\s*:\s*\[')


@dataclass(frozen=True, eq=False)
class OutputTokens:
    """N tokens that an engine generated, and their log-probabilities; NaN where the engine gave none."""

    ids: npt.NDArray[np.int32]  # [N]
    logprobs: npt.NDArray[np.float64]  # [N]


NO_TOKENS = OutputTokens(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float64))


def read_answer(body: bytes) -> Any:
    """The answer, with OutputTokens at meta_info.output_token_logprobs; output_ids, which says the same, is null.

    All numbers are parsed as one flat list: a list a pair takes twice the time, and wakes the collector of garbage.
    Raises ValueError for what is no JSON, or if the pairs are none of numbers.
    """
    pairs = PAIRS.search(body)
    if pairs is None:
        answer = orjson.loads(body)
        tokens = NO_TOKENS
    else:
        end = PAIRS_END.search(body, pairs.end())
        if end is None:
            raise ValueError("its log-probabilities do not end")
        tokens = _read_pairs(body[pairs.end() : end.start()])
        answer = orjson.loads(
            _without_ids(body[: pairs.end()].rpartition(b":")[0]) + b":null" + _without_ids(body[end.end() :])
        )
    if isinstance(answer, dict) and "meta_info" in answer:
        answer["meta_info"]["output_token_logprobs"] = tokens
    return answer


def _read_pairs(text: bytes) -> OutputTokens:
    """text: of the pairs, without the brackets around them all."""
    count = text.count(b"[") + 1
    flat = orjson.loads(b"[" + text.translate(None, b"[]") + b"]")
    if len(flat) != 3 * count or flat[2::3].count(None) != count:
        raise ValueError("a log-probability is no [value, token id, null]")
    try:
        return OutputTokens(np.array(flat[1::3], dtype=np.int32), np.array(flat[::3], dtype=np.float64))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a log-probability is no [value, token id, null]: {error}") from error


def _without_ids(text: bytes) -> bytes:
    """A part of the answer, with null for the list of token ids."""
    ids = IDS.search(text)
    if ids is None:
        return text
    return text[: ids.end() - 1] + b"null" + text[text.index(b"]", ids.end()) + 1 :]
