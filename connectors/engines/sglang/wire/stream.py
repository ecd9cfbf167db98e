"""Assembles the events of a streamed answer into the answer so far.

Owns the form of the events: SGLang sends all tokens in each event, or with --incremental-streaming-output only the new ones. Knows
nothing of requests or engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from millrace.connectors.engines.client import NO_TOKENS, OutputTokens
from millrace.connectors.engines.sglang.wire.answer_body import read_answer

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
