"""The state that a driver and its shards share: in whatever order, grouping or number its updates come, it is the same."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytest

from millrace.connectors.engines.dispatcher import EngineAddress
from millrace.core.contracts.task_records import FileRecord
from millrace.core.contracts.topics import Batch
from millrace.tasks.shards.board import (
    Attempt,
    Board,
    BoardState,
    EngineReply,
    EngineRequest,
    EnginesState,
    Failure,
    Idle,
    LostEngine,
    Part,
    merge,
)
from tests.support.local_board import TOKEN, LocalBoard

TOPIC = Batch(1)
FIRST, SECOND = Attempt("rollout", 0, 1), Attempt("rollout", 1, 2)
ENGINE = EngineAddress("engine-0", "http://a", None)
LOST = LostEngine("engine-0", "http://a", "it died", stalled=False)


def written(name: str, shard: int) -> Part:
    path = f"rollouts/{name}"
    return Part("rollouts", path, shard, FileRecord(path=path, sha256="", size=0, rows=1, table="rollouts"))


VALUES: Mapping[
    str, Sequence[Any]
] = {  # of each field, what updates may say, and last what all of them come to
    "released": (0, 2, 5, 3, 5),
    "deferred": (None, 0, 0),
    "settled": (False, True, True),
    "engines": (
        EnginesState(1, (ENGINE,), (EngineReply(FIRST, 1),)),
        EnginesState(2, (ENGINE,), (EngineReply(FIRST, 1),), updates=1, updating=True),
        newest := EnginesState(3, (), (EngineReply(FIRST, 1), EngineReply(SECOND, 1, "none")), updates=1),
        newest,
    ),
    "parts": (
        one := (Part("rollouts", "rollouts/a"),),
        two := (Part("rollouts", "rollouts/b"), written("c", 0)),
        three := (written("a", 1),),  # the driver has listed it since
        (*one, *two, *three),
    ),
    "failures": (
        (Failure("rollout", "died", "s0"),),
        (Failure("rollout", "died", "s0"), Failure("reward", "slow", "s0")),
        (Failure("rollout", "died", "s0"), Failure("reward", "slow", "s0")),
    ),
    "requests": (
        (EngineRequest(FIRST, 1),),
        (EngineRequest(FIRST, 2, (LOST,)),),  # the same engine is lost twice
        (EngineRequest(FIRST, 3, (LOST,)),),
        (EngineRequest(FIRST, 1), EngineRequest(FIRST, 2, (LOST,)), EngineRequest(FIRST, 3, (LOST,))),
    ),
    "idle": ((Idle(FIRST, 1),), (Idle(SECOND, 1),), (Idle(FIRST, 1), Idle(SECOND, 1))),
}
UPDATES = [BoardState(**{name: value}) for name, values in VALUES.items() for value in values[:-1]]


def plain(state: BoardState) -> dict[str, Any]:
    """Without the order of what is a set, and without the count of updates."""
    found = {each.name: getattr(state, each.name) for each in fields(state) if each.name != "revision"}
    return {name: frozenset(value) if isinstance(value, tuple) else value for name, value in found.items()}


WHOLE = plain(BoardState(**{name: values[-1] for name, values in VALUES.items()}))


def test_every_field_has_a_row() -> None:
    assert {"revision", *VALUES} == {each.name for each in fields(BoardState)}


@pytest.mark.parametrize("seed", range(20))
def test_neither_the_order_of_updates_nor_a_repetition_matters(seed: int) -> None:
    numbers = random.Random(seed)
    updates = [*UPDATES, *numbers.sample(UPDATES, 5)]
    numbers.shuffle(updates)
    assert plain(merge(updates)) == WHOLE
    known = BoardState()
    while updates:  # in groups, each merged before
        some = [updates.pop() for _ in range(min(len(updates), numbers.randrange(1, 5)))]
        known = merge([merge(some), known, merge(some)])
    assert plain(known) == WHOLE


def test_what_is_known_is_never_taken_back() -> None:
    known = BoardState()
    for update in [*UPDATES, *reversed(UPDATES)]:
        after = merge([known, update])
        assert plain(merge([known, after])) == plain(after)
        known = after


def test_parts_keep_the_order_in_which_they_became_known() -> None:
    a, b, c = (Part("rollouts", name) for name in "abc")
    assert merge([BoardState(parts=(b,)), BoardState(parts=(a, b)), BoardState(parts=(c, a))]).parts == (
        b,
        a,
        c,
    )


def test_an_older_word_about_engines_changes_nothing() -> None:
    """One that was made ready before an update would have shards send requests amid it."""
    ready, updating = EnginesState(4, (ENGINE,)), EnginesState(5, (ENGINE,), updates=1, updating=True)
    assert merge([BoardState(engines=updating), BoardState(engines=ready)]).engines == updating
    assert merge([BoardState(engines=updating), BoardState()]).engines == updating


@pytest.mark.parametrize("seed", range(5))
def test_a_reader_has_everything_however_seldom_it_reads_and_revisions_only_grow(seed: int) -> None:
    numbers, board = random.Random(seed), LocalBoard().board
    board.open(TOKEN, TOPIC)
    readers = [(BoardState(), numbers.random()) for _ in range(4)]
    for update in numbers.sample(UPDATES, len(UPDATES)):
        board.tell(TOKEN, TOPIC, update)
        for at, (known, often) in enumerate(readers):
            if numbers.random() < often:
                readers[at] = _read(board, known), often
    late = _read(board, BoardState())
    assert late.revision == len(UPDATES) == board.revision(TOKEN, TOPIC)
    for known, _ in readers:
        assert plain(_read(board, known)) == plain(late) == WHOLE


def _read(board: Board, known: BoardState) -> BoardState:
    new = board.wait(TOKEN, TOPIC, known.revision, 0)
    assert new.revision >= known.revision
    return merge([known, new])
