"""Parses answers to /generate, whole or streamed, with their tokens as arrays.

Owns parsing the pairs [log-probability, token id, null] without a Python list per token, and the form of a stream's events:
SGLang sends all tokens in each event, or with --incremental-streaming-output only the new ones. Knows nothing of requests or
engines.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millrace.connectors.engines.client import NO_TOKENS, OutputTokens

# a quoted name before a colon is a key, since inside a text its quotes would be escaped
PAIRS = re.compile(rb'"output_token_logprobs"\s*:\s*\[\s*\[')
IDS = re.compile(rb'"output_ids"\s*:\s*\[')
LONG = 16384  # bytes; shorter answers are not parsed as columns, which always costs a tenth of a millisecond
WORD = 8  # bytes that numpy compares or parses at once
COMMA, ZERO = ord(","), np.uint64(0x3030303030303030)
BETWEEN = np.uint64(int.from_bytes(b",null],[", "little"))  # between a token id and the next pair
LAST = b",null"  # after the last token id
MOST_BYTES = 2**31 - WORD  # Arrow's string offsets have 32 bits

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


def read_answer(body: bytes) -> Any:
    """Parse an answer, with OutputTokens at meta_info.output_token_logprobs. output_ids, which repeats the ids, becomes null.

    Raises ValueError if it is not JSON, or if the pairs do not hold numbers.
    """
    pairs = PAIRS.search(body)
    if pairs is None:
        answer = orjson.loads(body)
        tokens = NO_TOKENS
    else:
        start = pairs.end()
        last, end = _end_of_pairs(body, start)
        as_columns = _read_columns(body, start, last) if last - start >= LONG and last <= MOST_BYTES else None
        tokens = as_columns or _read_flat(body[start:last])
        answer = orjson.loads(
            _without_ids(body[:start].rpartition(b":")[0]) + b":null" + _without_ids(body[end:])
        )
    if isinstance(answer, dict) and "meta_info" in answer:
        answer["meta_info"]["output_token_logprobs"] = tokens
    return answer


def _end_of_pairs(body: bytes, start: int) -> tuple[int, int]:
    """The position of the last pair's closing bracket, and the end of the list. Log-probabilities contain no text."""
    quote = body.find(b'"', start)
    outer = body.rfind(b"]", start, quote if quote >= 0 else len(body))
    last = body.rfind(b"]", start, max(outer, start))
    if last < 0 or body[last + 1 : outer].strip():
        raise ValueError("its log-probabilities do not end, or are none of numbers")
    return last, outer + 1


def _read_columns(body: bytes, start: int, end: int) -> OutputTokens | None:
    """Parse the pairs as two columns, without a Python object per token; None if they have another form.

    A pair has three commas: the first follows its log-probability, the second its id, the third separates pairs.
    """
    commas = np.flatnonzero(np.frombuffer(body, np.uint8, end - start, start) == COMMA)
    commas += start
    after_logprob, after_id = commas[::3], commas[1::3]
    words: Words = np.ndarray(len(body) - WORD + 1, "<u8", body, strides=(1,))  # overlapping, one per byte
    if len(commas) % 3 != 2 or body[after_id[-1] : end] != LAST or (words[after_id[:-1]] != BETWEEN).any():
        return None
    ids = _read_digits(words, after_logprob + 1, after_id)
    logprobs = _read_decimals(body, np.append(start, commas[2::3] + 2), after_logprob)
    return None if ids is None or logprobs is None else OutputTokens(ids, logprobs)


def _read_digits(words: Words, starts: Places, ends: Places) -> npt.NDArray[np.int32] | None:
    """Parse the numbers at these positions; None unless each has one to eight digits."""
    digits = ends - starts
    if digits.min() < 1 or digits.max() > WORD:
        return None
    other = (8 * (WORD - digits)).astype(np.uint64)  # bits of bytes before the first digit
    found = words[ends - WORD] ^ ZERO
    found = found >> other << other
    if ((found + np.uint64(0x7676767676767676) | found) & np.uint64(0x8080808080808080)).any():
        return None  # a byte is not a digit
    found = found * np.uint64(10) + (found >> np.uint64(8))  # every second byte is now a two-digit number
    low = found & np.uint64(0x000000FF000000FF)
    high = found >> np.uint64(16) & np.uint64(0x000000FF000000FF)
    found = low * np.uint64(100 + (1000000 << 32)) + high * np.uint64(1 + (10000 << 32))
    return (found >> np.uint64(32)).astype(np.int32)


def _read_decimals(body: bytes, starts: Places, ends: Places) -> npt.NDArray[np.float64] | None:
    """Parse the numbers at these positions; None if one is not a number.

    Arrow parses them: the body is passed as strings side by side, of which every second one, between two numbers, is null.
    """
    places = np.empty(2 * len(starts) + 1, dtype=np.int32)
    places[:-1:2], places[1::2], places[-1] = starts, ends, ends[-1]
    valid = b"\x55" * (len(starts) // 4 + 1)
    texts = pa.StringArray.from_buffers(
        len(places) - 1, pa.py_buffer(places), pa.py_buffer(body), pa.py_buffer(valid), len(starts)
    )
    try:
        numbers = pc.cast(texts, pa.float64())
    except pa.ArrowInvalid:
        return None
    return np.frombuffer(numbers.buffers()[1], np.float64, len(texts))[::2].copy()


def _read_flat(text: bytes) -> OutputTokens:
    """Parse the pairs as one flat list. A list per pair would take twice the time, and trigger the garbage collector."""
    count = text.count(b"[") + 1
    flat = orjson.loads(b"[" + text.translate(None, b"[]") + b"]")
    if len(flat) != 3 * count or flat[2::3].count(None) != count:
        raise ValueError("a log-probability is no [value, token id, null]")
    try:
        return OutputTokens(np.array(flat[1::3], dtype=np.int32), np.array(flat[::3], dtype=np.float64))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a log-probability is no [value, token id, null]: {error}") from error


def _without_ids(text: bytes) -> bytes:
    """A part of the answer with null instead of the list of token ids."""
    ids = IDS.search(text)
    if ids is None:
        return text
    return text[: ids.end() - 1] + b"null" + text[text.index(b"]", ids.end()) + 1 :]


DONE = b"[DONE]"
DATA = b"data:"


class EventReader:
    """Splits received bytes into the data of events."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, received: bytes) -> Iterator[bytes]:
        """The data of the events that are now complete."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                yield line[len(DATA) :].strip()


class StreamedAnswer:
    """An answer that grows by its events."""

    def __init__(self) -> None:
        self._tokens, self._text = NO_TOKENS, ""

    def add(self, data: bytes) -> Any:
        """The answer so far after an event, in the form of `read_answer`. Raises ValueError if the data is not an event of an answer."""
        answer = read_answer(data)
        if not isinstance(answer, dict) or "meta_info" not in answer:
            raise ValueError(f"{data[:200]!r} is not an event of an answer")
        meta = answer["meta_info"]
        new: OutputTokens = meta["output_token_logprobs"]
        before, made = len(self._tokens.ids), meta["completion_tokens"]
        if len(new.ids) == made:  # the event has all tokens
            self._tokens, self._text = new, answer["text"]
        elif before + len(new.ids) == made:  # the event has only the new tokens
            self._tokens = OutputTokens(
                np.concatenate([self._tokens.ids, new.ids]),
                np.concatenate([self._tokens.logprobs, new.logprobs]),
            )
            self._text += answer["text"]
        else:
            raise ValueError(f"{len(new.ids)} tokens came after {before}, but the event counts {made}")
        meta["output_token_logprobs"] = self._tokens
        return {**answer, "text": self._text}
