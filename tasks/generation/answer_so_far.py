"""The earlier part of an answer, and the whole answer with its new part. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from millrace.connectors.engines.client import NO_TOKENS
from millrace.connectors.engines.dispatching.pieces import NOTHING, joined_spans
from millrace.core.contracts.sample import GeneratedSample, PolicySpan
from millrace.core.contracts.turns import TurnRow
from millrace.tasks.generation.single_samples import Answer


@dataclass(frozen=True)
class Made:
    """The earlier part of an answer."""

    output_ids: npt.NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS.ids)
    logprobs: npt.NDArray[np.float64] = field(default_factory=lambda: NO_TOKENS.logprobs)
    versions: list[tuple[int, int]] = field(default_factory=list)  # first token, weight version
    engine_id: str = ""

    @classmethod
    def of(cls, row: GeneratedSample | None) -> Made:
        """The part in the row of a cut sample; empty for None."""
        if row is None:
            return cls()
        length = row.response_length
        ids = np.asarray(row.tokens[len(row.tokens) - length :], dtype=np.int32)
        logprobs = np.asarray(row.rollout_logprobs, dtype=np.float64)
        return cls(ids, logprobs, _versions(row.policy_versions), row.engine_id)

    def plus(self, row: TurnRow) -> Made:
        """This part with one more segment."""
        return Made(
            np.concatenate([self.output_ids, np.asarray(row.output_ids, dtype=np.int32)]),
            np.concatenate([self.logprobs, np.asarray(row.rollout_logprobs, dtype=np.float64)]),
            joined_spans(self.versions, _versions(row.policy_versions), len(self.output_ids)),
            row.engine_id,
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
        return replace(answer, generation=whole)


def _versions(spans: Iterable[PolicySpan]) -> list[tuple[int, int]]:
    return [(span["first_token"], span["version"]) for span in spans]
