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
import pyarrow as pa
import pyarrow.csv as pc

# a quoted name before a colon is a key: in a text its quotes would be escaped
PAIRS = re.compile(rb'"output_token_logprobs"\s*:\s*\[\s*\[')
IDS = re.compile(rb'"output_ids"\s*:\s*\[')
LONG = 16384  # bytes of pairs that are read as columns, which costs a tenth of a millisecond however short they are
# [v,t,null],[v,t,null] as lines of five fields, of which the last two are empty
AS_LINES = bytes({ord("["): ord("\n"), ord("]"): ord(",")}.get(byte, byte) for byte in range(256))
FIELDS = pc.ConvertOptions(
    include_columns=["logprob", "id", "text"],
    column_types={"logprob": pa.float64(), "id": pa.int32(), "text": pa.null()},
    null_values=["null"],
)


@dataclass(frozen=True, eq=False)
class OutputTokens:
    """N tokens that an engine generated, and their log-probabilities; NaN where the engine gave none."""

    ids: npt.NDArray[np.int32]  # [N]
    logprobs: npt.NDArray[np.float64]  # [N]


NO_TOKENS = OutputTokens(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float64))


def read_answer(body: bytes) -> Any:
    """The answer, with OutputTokens at meta_info.output_token_logprobs; output_ids, which says the same, is null.

    Raises ValueError for what is no JSON, or if the pairs are none of numbers.
    """
    pairs = PAIRS.search(body)
    if pairs is None:
        answer = orjson.loads(body)
        tokens = NO_TOKENS
    else:
        last, end = _end_of_pairs(body, pairs.end())
        tokens = _read_pairs(body[pairs.end() : last])
        answer = orjson.loads(
            _without_ids(body[: pairs.end()].rpartition(b":")[0]) + b":null" + _without_ids(body[end:])
        )
    if isinstance(answer, dict) and "meta_info" in answer:
        answer["meta_info"]["output_token_logprobs"] = tokens
    return answer


def _end_of_pairs(body: bytes, start: int) -> tuple[int, int]:
    """Where the last pair's bracket closes, and where the list is over. There is no text in between."""
    quote = body.find(b'"', start)
    outer = body.rfind(b"]", start, quote if quote >= 0 else len(body))
    last = body.rfind(b"]", start, max(outer, start))
    if last < 0 or body[last + 1 : outer].strip():
        raise ValueError("its log-probabilities do not end, or are none of numbers")
    return last, outer + 1


def _read_pairs(text: bytes) -> OutputTokens:
    """text: of the pairs, without the brackets around them all."""
    return (_read_columns(text) if len(text) >= LONG else None) or _read_flat(text)


def _read_columns(text: bytes) -> OutputTokens | None:
    """The pairs as two columns, without a Python object a token and without the interpreter's lock; None if they have another form."""
    lines = text.translate(AS_LINES) + b",,"
    options = pc.ReadOptions(
        column_names=["logprob", "id", "text", "4", "5"], use_threads=False, block_size=len(lines) + 1
    )
    try:
        table = pc.read_csv(pa.BufferReader(lines), read_options=options, convert_options=FIELDS)
    except pa.ArrowInvalid:
        return None
    ids, logprobs = table.column("id").combine_chunks(), table.column("logprob").combine_chunks()
    if ids.null_count:
        return None
    return OutputTokens(ids.to_numpy(zero_copy_only=False), logprobs.to_numpy(zero_copy_only=False))


def _read_flat(text: bytes) -> OutputTokens:
    """The numbers of the pairs parsed as one flat list: a list a pair takes twice the time, and wakes the collector of garbage."""
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
