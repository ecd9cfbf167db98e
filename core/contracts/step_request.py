"""What trainer ranks are asked for when they make an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.contracts.task_records import StepMetrics
from millrace.core.logprob_gap import LogprobGuard


@dataclass(frozen=True)
class StepRequest:
    """The step that makes weight version `version` of the one before, from the rows of a batch that name it."""

    version: int
    batch_url: str
    # with an iteration's first step: what the difference of engine and trainer may be, on the samples of any of its steps
    guard: LogprobGuard | None = None
    # its figures if it was made before: it is made under the settings of that time
    recorded: StepMetrics | None = None
    batch_sha256: str | None = None  # in the record or manifest that committed the batch
    chunks: Sequence[int] | None = None  # rows of each chunk, if passes are made chunk by chunk
    # with an iteration's first step: whether the trainer's log-probabilities are written
    stores: bool = False
