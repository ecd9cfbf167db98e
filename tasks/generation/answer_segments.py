"""The stored segments of an unfinished answer: which count after a kill, and how the answer continues.

Owns that segments fit together: each row has the hash of all ids before it. A row that does not follow the previous ones is
left out, with all after it. Segments are rows of turns/, like the turns of rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from millrace.connectors.engines.client import Generation
from millrace.connectors.engines.dispatching.pieces import segment
from millrace.core.contracts.ids import tokens_hash
from millrace.core.contracts.sample import DrawnGroup, PolicySpan
from millrace.core.contracts.turns import TurnKind, TurnRow, first_gap, rows_that_count
from millrace.tasks.generation.answer_so_far import Made
from millrace.tasks.generation.part_writer import PartWriter


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
        values: dict[str, Any] = {
            "event": 0,
            "segment": 0,
            "prompt": "",
            "new_ids": [],
            "output_ids": [],
            "rollout_logprobs": [],
            "policy_versions": [],
            "engine_id": "",
            "text": "",
            "ended": "",
            **given,
        }
        self._order += 1
        return TurnRow(
            rollout_id=self._sample,
            group_id=self._group.group_id,
            order=self._order - 1,
            branch=0,
            parent=None,
            parent_turns=None,
            name=None,
            kind=kind,
            seed=self._seed,
            new=None,
            tool=None,
            arguments=None,
            failed=False,
            timings=[],
            **values,
        )
