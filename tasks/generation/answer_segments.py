"""The stored segments of an unfinished answer: which count after a kill, and how the answer continues.

Owns that segments fit together: each row has the hash of all ids before it. A row that does not follow the previous ones is
left out, with all after it. Segments are rows of turns/, like the turns of rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.connectors.engines.client import NO_TOKENS, Generation
from millrace.connectors.engines.dispatching.pieces import NOTHING, joined_spans, segment
from millrace.core.contracts.ids import tokens_hash
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample, PolicySpan
from millrace.core.contracts.turns import TurnKind, TurnRow, first_gap, rows_that_count
from millrace.tasks.generation.part_writer import PartWriter
from millrace.tasks.generation.single_samples import Answer


@dataclass(frozen=True)
class Made:
    """The earlier part of an answer."""

    output_ids: npt.NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS.ids)
    logprobs: npt.NDArray[np.float64] = field(default_factory=lambda: NO_TOKENS.logprobs)
    versions: list[tuple[int, int]] = field(default_factory=list)  # first token, weight version
    engine_id: str = ""
    routed: bytes = b""  # stored experts of prompt and answer, but of the last token

    @classmethod
    def of(cls, row: GeneratedSample | None) -> Made:
        """The part in the row of a cut sample; empty for None."""
        if row is None:
            return cls()
        length = row.response_length
        ids = np.asarray(row.tokens[len(row.tokens) - length :], dtype=np.int32)
        logprobs = np.asarray(row.rollout_logprobs, dtype=np.float64)
        versions = _versions(row.policy_versions)
        return cls(ids, logprobs, versions, row.engine_id, row.routed_experts or b"")

    def plus(self, row: TurnRow) -> Made:
        """This part with one more segment."""
        return Made(
            np.concatenate([self.output_ids, np.asarray(row.output_ids, dtype=np.int32)]),
            np.concatenate([self.logprobs, np.asarray(row.rollout_logprobs, dtype=np.float64)]),
            joined_spans(self.versions, _versions(row.policy_versions), len(self.output_ids)),
            row.engine_id,
            self.routed + (row.routed_experts or b""),
        )

    def then(self, answer: Answer, text_of: Callable[[Sequence[int]], str]) -> Answer:
        """The whole answer, with its new part. A failed answer has no tokens."""
        if not len(self.output_ids) or answer.status == "failed":
            return answer
        new = answer.generation or replace(NOTHING, engine_id=self.engine_id)
        output_ids = np.concatenate([self.output_ids, new.output_ids])
        whole = replace(
            new,
            output_ids=output_ids,
            logprobs=np.concatenate([self.logprobs, new.logprobs]),
            text=text_of(output_ids.tolist()),
            weight_versions=joined_spans(self.versions, new.weight_versions, len(self.output_ids)),
        )
        return replace(answer, generation=whole, routed_before=self.routed)


def _versions(spans: Iterable[PolicySpan]) -> list[tuple[int, int]]:
    return [(span["first_token"], span["version"]) for span in spans]


class AnswerSegments:
    """The segments of one answer: read from earlier attempts, and stored as the answer grows."""

    def __init__(
        self,
        group: DrawnGroup,
        sample: str,
        seed: int,
        before: Made,
        rows: Iterable[TurnRow],
        writer: PartWriter,
        text_of: Callable[[Sequence[int]], str],
    ) -> None:
        """before: the part that earlier iterations made. rows: all stored rows of the sample."""
        self.made = before  # the valid tokens when this attempt started
        self._group, self._sample, self._seed = group, sample, seed
        self._writer, self._text_of = writer, text_of
        self._ids = [*group.prompt_tokens, *before.output_ids.tolist()]
        stored = list(rows)
        self._left_out = first_gap(stored)
        self._number = 0
        for row in rows_that_count(stored):
            if row.prompt != tokens_hash(self._ids):
                self._left_out = row.order
                break
            self.made = self.made.plus(row)
            self._ids += row.output_ids
            self._number += 1
        self._order = max((row.order for row in stored), default=-1) + 1
        self._begun_at = len(self._ids)

    def put(self, piece: Generation) -> Callable[[], bool]:
        """Store a segment, which follows all earlier ones; returns a function that tells whether it is stored."""
        rows = []
        if self._left_out is not None:
            rows.append(self._row("resumed", event=self._left_out))
            self._left_out = None
        ids = piece.output_ids.tolist()
        row = self._row(
            "answer",
            segment=self._number,
            prompt=tokens_hash(self._ids),
            new_ids=[] if self._number else self._group.prompt_tokens,
            output_ids=ids,
            rollout_logprobs=piece.logprobs.tolist(),
            policy_versions=[
                PolicySpan(first_token=first, version=version) for first, version in piece.weight_versions
            ],
            engine_id=piece.engine_id,
            routed_experts=piece.routed.data if piece.routed else None,
            text=self._text_of(ids),
            ended=piece.finish,
        )
        self._ids += ids
        self._number += 1
        return self._writer.put([*rows, row])

    def put_rest(self, made: Generation) -> None:
        """Store the rest of an answer. made: all tokens that this attempt made."""
        start = len(self._ids) - self._begun_at
        if len(made.output_ids) > start:
            self.put(segment(made, start))

    async def settled(self) -> None:
        """Wait until all segments are stored."""
        await self._writer.settled(at_once=True)

    def _row(self, kind: TurnKind, **given: Any) -> TurnRow:
        self._order += 1
        return TurnRow(
            rollout_id=self._sample,
            group_id=self._group.group_id,
            order=self._order - 1,
            branch=0,
            kind=kind,
            seed=self._seed,
            **given,
        )
