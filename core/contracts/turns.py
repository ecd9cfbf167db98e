"""What a rollout of several turns leaves behind as it goes on: rows of the parts in turns/, in the order they happened.

Whoever reads them back has the rollout as far as it was committed. A turn is a chain of segments, each made by one engine in
one attempt: a turn that is continued after it was cut has one segment more and is never generated again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millrace.core.contracts.sample import Figures, Float32, Int32, JsonText, PolicySpan

TurnKind = Literal["segment", "call", "diverged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """A segment of a turn, or a tool's answer: a row of a part in turns/.

    diverged: from this event of the branch on, earlier rows do not count: a restarted rollout asked for something else.
    """

    rollout_id: str
    group_id: str
    order: Int32  # among the rows of the rollout
    branch: Int32
    parent: Int32 | None  # branch that it began from, and after how many of that one's turns
    parent_turns: Int32 | None
    name: str | None  # of the branch
    event: Int32  # number of the turn or call within its branch
    kind: TurnKind
    segment: Int32
    prompt: str  # hash of all ids before its output
    new_ids: list[Int32]  # of the prompt since the turn before; of the first segment
    output_ids: list[Int32]
    rollout_logprobs: list[Float32]  # per output token
    policy_versions: list[PolicySpan]
    engine_id: str
    seed: int
    ended: str  # why the segment ended: stop, length, abort
    new: JsonText | None  # what was observed, for reading
    text: str  # that was generated, or the tool's answer
    tool: str | None
    arguments: JsonText | None
    failed: bool  # of a call: its answer says what went wrong
    timings: Figures  # seconds
