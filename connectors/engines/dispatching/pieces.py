r"""The pieces of one answer that several requests made, joined and cut; and the storing of unfinished answers, segment by segment.

Each token keeps the version that made it. Little of a long answer is generated again after a kill: owns when a segment is due,
and that no engine runs far ahead of storage. Knows nothing of requests or files.

    engine   tokens ->  |----|----|----|--        an event every `interval` tokens
    storage  segments   |====|====|               written meanwhile, one after the other
                                  \___ unstored: an engine that is too far ahead of storage is halted, and goes on
                                       once storage has what there is
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

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
        routed=before.routed.then(after.routed) if before.routed and after.routed else None,
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
    """The tokens of an answer from `start` on. Has no text, since a part of the tokens may not decode to text.

    A later part has the experts of the token before it too, which only then was fed.
    """
    inside = [(max(0, first - start), version) for first, version in made.weight_versions]
    spans = [span for span, after in zip(inside, [*inside[1:], (1, 0)], strict=True) if after[0] > 0]
    return replace(
        made,
        output_ids=made.output_ids[start:],
        logprobs=made.logprobs[start:],
        text="",
        cuts=tuple(cut - start for cut in made.cuts if cut > start),
        weight_versions=spans,
        routed=made.routed.last(len(made.output_ids) - start) if made.routed and start else made.routed,
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
        routed=made.routed.without_last(len(made.output_ids) - length) if made.routed else None,
    )


PARTS = 4  # events per rollout.flush_tokens; the engine is halted at the third unstored one, since halting takes a moment


class SegmentStore(Protocol):
    """Stores the segments of one answer, in their order."""

    def put(self, segment: Generation) -> Callable[[], bool]:
        """Start to store a segment. Returns a function that tells whether it is stored."""
        ...

    async def settled(self) -> None:
        """Wait until all segments are stored."""
        ...


class Flush:
    """Stores one answer while it is generated. Each segment starts at the end of the previous one."""

    def __init__(self, tokens: int, store: SegmentStore) -> None:
        """tokens: at most this many are generated again after a kill (rollout.flush_tokens)."""
        self.interval = max(1, tokens // PARTS)
        self._most = tokens - 2 * self.interval
        self._store = store
        self._put = self._stored = 0  # tokens
        self._pending: list[
            tuple[int, Callable[[], bool]]
        ] = []  # number of tokens at the end of a segment, and whether it is stored

    def take(self, made: Generation, least: int = 1) -> bool:
        """Store the unstored tokens of the answer, if there are at least `least`; returns whether the engine may continue.

        made: the answer so far, with each token's version.
        """
        length = len(made.output_ids)
        if length - self._put >= max(1, least):
            self._pending.append((length, self._store.put(segment(made, self._put))))
            self._put = length
        while self._pending and self._pending[0][1]():
            self._stored = self._pending.pop(0)[0]
        return length - self._stored <= self._most

    async def settled(self) -> None:
        """Wait until all segments are stored."""
        await self._store.settled()


class Parts:
    """Receives the parts of one request's answer."""

    def __init__(self, before: Generation, flush: Flush, allowed: range) -> None:
        """before: the part of the answer from earlier requests. allowed: weight versions."""
        self.made, self.halted = before, False
        self._before, self._flush, self._allowed = before, flush, allowed

    def take(self, part: Generation) -> bool:
        """Store what is due of an answer so far; returns whether the engine may continue."""
        if any(version not in self._allowed for _, version in part.weight_versions):
            return True  # not stored, since the whole answer will be refused
        self.made = joined(self._before, part)
        self.halted = not self._flush.take(self.made, self._flush.interval)
        return not self.halted
