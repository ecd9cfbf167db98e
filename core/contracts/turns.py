"""The stored turns of a rollout of several turns: rows of the parts in turns/, in the order they happened.

Reading them back gives the rollout as far as it was committed. A turn is a chain of segments, each made by one engine in
one attempt: a turn that is continued after it was cut has one segment more and is never generated again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Literal, TypeVar

from millrace.core.contracts.sample import Bytes, Figures, Float32, Int32, JsonText, PolicySpan

TurnKind = Literal["segment", "call", "diverged", "resumed", "answer"]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """A segment of a turn, or a tool's answer: a row of a part in turns/.

    diverged: from this event of the branch on, earlier rows do not count: a restarted rollout asked for something else.
    answer: a segment of an answer without turns, stored before the answer was finished; the sample's row later has its tokens
    too. resumed: earlier rows from number `event` of the rollout on do not count: some of them were lost with a broken part.
    """

    rollout_id: str
    group_id: str
    order: Int32  # number among the rows of the rollout
    branch: Int32
    parent: Int32 | None = None  # the branch that it started from, and after how many of that branch's turns
    parent_turns: Int32 | None = None
    name: str | None = None  # name of the branch
    event: Int32 = 0  # number of the turn or call within its branch
    kind: TurnKind
    segment: Int32 = 0
    prompt: str = ""  # hash of all ids before the output
    # ids of the prompt since the previous turn; in the turn's first segment
    new_ids: list[Int32] = field(default_factory=list)
    output_ids: list[Int32] = field(default_factory=list)
    rollout_logprobs: list[Float32] = field(default_factory=list)  # per output token
    policy_versions: list[PolicySpan] = field(default_factory=list)
    engine_id: str = ""
    seed: int = 0
    ended: str = ""  # why the segment ended: stop, length, abort
    new: JsonText | None = None  # the observation, for reading
    text: str = ""  # the generated text, or the tool's answer
    tool: str | None = None
    arguments: JsonText | None = None
    failed: bool = False  # for a call: whether its answer is an error
    timings: Figures = field(default_factory=list)  # seconds
    # experts of the tokens since those of the rollout's rows before, up to the one before the last output token, as in GeneratedSample
    routed_experts: Bytes | None = None


_PLACE = ("order", "branch", "event", "kind")
place_of_row: Callable[[Any], tuple[int, int, int, TurnKind]] = attrgetter(*_PLACE)  # key of a TurnRow
place_of_columns: Callable[[Any], tuple[int, int, int, TurnKind]] = itemgetter(*_PLACE)  # key of a mapping


def rows_that_count(
    rows: Iterable[Row], place: Callable[[Row], tuple[int, int, int, TurnKind]] = place_of_row
) -> list[Row]:
    """The segments and calls of one rollout that count, in their order.

    Rows after a gap, which a broken part leaves, do not count until the rollout was resumed. A row that says
    `diverged` or `resumed` ends what came before it, as `TurnRow` has it.
    """
    return _walked(rows, place)[0]


def first_gap(rows: Iterable[TurnRow]) -> int | None:
    """Number of the first row of a rollout that is missing before others and was not resumed after; None without one."""
    return _walked(rows, place_of_row)[1]


def _walked(
    rows: Iterable[Row], place: Callable[[Row], tuple[int, int, int, TurnKind]]
) -> tuple[list[Row], int | None]:
    """The rows that count, and the first gap that no row resumed after."""
    found: list[tuple[int, int, int, Row]] = []
    due = 0
    gap: int | None = None
    for row in sorted(rows, key=lambda row: place(row)[0]):
        order, branch, event, kind = place(row)
        if kind == "resumed":
            found = [entry for entry in found if entry[0] < event]
            gap = None
        elif order != due:
            gap = due if gap is None else gap
            continue
        elif kind == "diverged":
            found = [entry for entry in found if entry[1] != branch or entry[2] < event]
        else:
            found.append((order, branch, event, row))
        due = order + 1
    return [row for *_, row in found], gap
