"""Pieces of one answer that several requests made: put together, and cut. Each token keeps the version that made it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.connectors.sglang.client import Generation
from millrace.connectors.sglang.wire.answer_body import NO_TOKENS

NOTHING = Generation(NO_TOKENS.ids, NO_TOKENS.logprobs, "", "abort", [], "", 0)


def joined(before: Generation, after: Generation) -> Generation:
    """Two pieces of an answer as one."""
    if not len(before.output_ids):
        return after
    if not len(after.output_ids):  # cut before its first token: its weights made none
        return replace(before, finish=after.finish, pieces=before.pieces + after.pieces)
    return replace(
        after,
        output_ids=np.concatenate([before.output_ids, after.output_ids]),
        logprobs=np.concatenate([before.logprobs, after.logprobs]),
        text=before.text + after.text,
        pieces=before.pieces + after.pieces,
        weight_versions=joined_spans(before.weight_versions, after.weight_versions, len(before.output_ids)),
    )


def joined_spans(
    before: list[tuple[int, int]], after: list[tuple[int, int]], at: int
) -> list[tuple[int, int]]:
    """Spans (first token, weight version) of two pieces, of which the second begins at token `at`; neighbours of one version are one."""
    spans = list(before)
    for first, version in after:
        if not spans or spans[-1][1] != version:
            spans.append((at + first, version))
    return spans


def shortened(params: Mapping[str, Any], made: int) -> dict[str, Any]:
    """Sampling parameters of what is left of an answer of which so many tokens are made."""
    left = {**params, "max_new_tokens": params.get("max_new_tokens", 0) - made}
    if params.get("min_new_tokens"):  # a row, or a turn, may have room for fewer
        left["min_new_tokens"] = max(0, min(params["min_new_tokens"] - made, left["max_new_tokens"]))
    return left


def segment(made: Generation, start: int) -> Generation:
    """The tokens of an answer from `start` on. Its text is not known: that of a part of the tokens may be no text."""
    inside = [(max(0, first - start), version) for first, version in made.weight_versions]
    spans = [span for span, after in zip(inside, [*inside[1:], (1, 0)], strict=True) if after[0] > 0]
    return replace(
        made,
        output_ids=made.output_ids[start:],
        logprobs=made.logprobs[start:],
        text="",
        weight_versions=spans,
    )
