"""Joins and cuts the pieces of one answer that several requests made. Each token keeps the version that made it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.connectors.engines.client import NO_TOKENS, Generation

NOTHING = Generation(NO_TOKENS.ids, NO_TOKENS.logprobs, "", "abort", [], "", 0)


def joined(before: Generation, after: Generation) -> Generation:
    """Two pieces of an answer as one."""
    if not len(before.output_ids):
        return after
    if not len(after.output_ids):  # interrupted before its first token, so its version made none
        return replace(before, finish=after.finish, pieces=before.pieces + after.pieces)
    return replace(
        after,
        output_ids=np.concatenate([before.output_ids, after.output_ids]),
        logprobs=np.concatenate([before.logprobs, after.logprobs]),
        text=before.text + after.text,
        pieces=before.pieces + after.pieces,
        cuts=(*before.cuts, *(len(before.output_ids) + cut for cut in (0, *after.cuts))),
        weight_versions=joined_spans(before.weight_versions, after.weight_versions, len(before.output_ids)),
    )


def joined_spans(
    before: list[tuple[int, int]], after: list[tuple[int, int]], at: int
) -> list[tuple[int, int]]:
    """Spans (first token, weight version) of two pieces, the second from token `at` on. Neighbours of one version are merged."""
    spans = list(before)
    for first, version in after:
        if not spans or spans[-1][1] != version:
            spans.append((at + first, version))
    return spans


def shortened(params: Mapping[str, Any], made: int) -> dict[str, Any]:
    """Sampling parameters for the rest of an answer that has `made` tokens."""
    left = {**params, "max_new_tokens": params.get("max_new_tokens", 0) - made}
    if params.get("min_new_tokens"):  # at most the room that a row or turn has left
        left["min_new_tokens"] = max(0, min(params["min_new_tokens"] - made, left["max_new_tokens"]))
    return left


def segment(made: Generation, start: int) -> Generation:
    """The tokens of an answer from `start` on. Has no text, since a part of the tokens may not decode to text."""
    inside = [(max(0, first - start), version) for first, version in made.weight_versions]
    spans = [span for span, after in zip(inside, [*inside[1:], (1, 0)], strict=True) if after[0] > 0]
    return replace(
        made,
        output_ids=made.output_ids[start:],
        logprobs=made.logprobs[start:],
        text="",
        cuts=tuple(cut - start for cut in made.cuts if cut > start),
        weight_versions=spans,
    )


PATTERN_REACH = 64  # tokens after a cut that are searched for a `stop_regex` match that starts before the cut


def ended_at_stop(
    made: Sequence[int], new: Generation, params: Mapping[str, Any], text_of: Callable[[Sequence[int]], str]
) -> Generation:
    """The answer, ended at the first stop text that starts before a cut and ends after it.

    SGLang misses such a stop: it searches only the tokens of one request, and earlier tokens are input of the next one. made: the
    tokens before `new`. params: of the first request.
    """
    texts, patterns = params.get("stop") or (), params.get("stop_regex") or ()
    if not (texts or patterns):
        return new
    whole, least = [*made, *new.output_ids.tolist()], params.get("min_new_tokens") or 0
    # a token is at least a byte
    reach = max([*(len(text.encode()) for text in texts), *(PATTERN_REACH for _ in patterns)])

    def ends(length: int) -> bool:
        text = text_of(whole[:length])
        return any(stop in text for stop in texts) or any(re.search(stop, text) for stop in patterns)

    for cut in (len(made) + first for first in ((0, *new.cuts) if made else new.cuts)):
        last = min(cut + reach, len(whole))
        if texts and not patterns and not ends(last):
            continue
        for length in range(max(cut + 1, least), last + 1):
            if ends(length):
                return _cut_to(new, length - len(made), text_of(whole[:length]))
    return new


def _cut_to(made: Generation, length: int, text: str) -> Generation:
    """The first tokens of an answer, as if it had stopped there."""
    return replace(
        made,
        output_ids=made.output_ids[:length],
        logprobs=made.logprobs[:length],
        text=text,
        finish="stop",
        cuts=tuple(cut for cut in made.cuts if cut < length),
        weight_versions=[span for span in made.weight_versions if span[0] < length],
    )
