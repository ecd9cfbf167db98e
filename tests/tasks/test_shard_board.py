"""The board between a driver and its shards: who may write to it, and what reaches whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pyarrow as pa
import pytest

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.ray.actors import Actor
from millrace.connectors.storage.parts import write_part
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.task_records import FileRecord
from millrace.core.contracts.topics import Batch, EvaluationTopic
from millrace.core.errors import BudgetError, EngineError
from millrace.tasks.context import IterationContext
from millrace.tasks.rollout import rollout_budget
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.shards.attempts import Attempts, DriverSide, on_ray
from millrace.tasks.shards.board import Attempt, Board, BoardState, Failure, Link, Part, ShardReplacedError
from millrace.tasks.shards.shard import ShardStream
from millrace.tasks.stream import Stream
from tests.support.local_board import TOKEN, LocalBoard, facts
from tests.support.stored_samples import drawn_group, sample_of

INDEX = 1
TOPIC = Batch(INDEX)


def file(name: str) -> FileRecord:
    return FileRecord(path=f"rollouts/{name}", sha256="", size=0, rows=1, table="rollouts")


def part(name: str) -> BoardState:
    return BoardState(parts=(Part("rollouts", f"rollouts/{name}", 0, file(name)),))


@pytest.fixture
def board() -> Board:
    found = LocalBoard().board
    found.open(TOKEN, TOPIC)
    return found


def test_an_attempt_that_was_replaced_writes_nothing(board: Board) -> None:
    first, other, second = Attempt("rollout", 0, 1), Attempt("reward", 0, 2), Attempt("rollout", 0, 3)
    board.start(TOKEN, TOPIC, first)
    board.start(TOKEN, TOPIC, other)
    board.tell(TOKEN, TOPIC, part("a"), first)
    board.start(TOKEN, TOPIC, second)
    with pytest.raises(ShardReplacedError, match="does not wait for this attempt of shard 0 of rollout"):
        board.tell(TOKEN, TOPIC, part("b"), first)
    board.tell(TOKEN, TOPIC, part("c"), second)
    board.tell(TOKEN, TOPIC, BoardState(), other)
    told = board.wait(TOKEN, TOPIC, 0, 0)
    assert [each.path for each in told.parts] == ["rollouts/a", "rollouts/c"]


def test_an_attempt_that_was_given_up_writes_nothing_and_the_next_one_is_not_given_up_with_it(
    board: Board,
) -> None:
    first, second = Attempt("rollout", 0, 1), Attempt("rollout", 0, 2)
    board.start(TOKEN, TOPIC, first)
    board.give_up(TOKEN, TOPIC, first)
    with pytest.raises(ShardReplacedError, match="does not wait"):
        board.tell(TOKEN, TOPIC, part("a"), first)
    board.start(TOKEN, TOPIC, second)
    board.give_up(TOKEN, TOPIC, first)
    board.tell(TOKEN, TOPIC, part("b"), second)


@pytest.mark.parametrize("closed", [False, True])
def test_an_attempt_on_a_topic_that_is_opened_again_is_replaced_and_learns_it(
    board: Board, closed: bool
) -> None:
    before = Attempt("rollout", 0, 1)
    board.start(TOKEN, TOPIC, before)
    if closed:
        board.close(TOKEN, TOPIC)
    board.open(TOKEN, TOPIC)
    with pytest.raises(ShardReplacedError, match="does not wait"):
        board.wait(TOKEN, TOPIC, 0, 0, before)
    board.start(TOKEN, TOPIC, Attempt("rollout", 0, 2))
    with pytest.raises(ShardReplacedError, match="does not wait"):
        board.tell(TOKEN, TOPIC, part("a"), before)
    with pytest.raises(ShardReplacedError, match="does not wait"):
        board.wait(TOKEN, TOPIC, 5, 0, before)


def test_the_batch_of_an_iteration_and_its_evaluation_have_states_of_their_own(board: Board) -> None:
    evaluation = EvaluationTopic(INDEX, done=INDEX, version=2, task="evaluate_before")
    board.open(TOKEN, evaluation)
    board.tell(TOKEN, evaluation, BoardState(released=3))
    assert board.wait(TOKEN, TOPIC, 0, 0) == BoardState()
    assert board.revision(TOKEN, evaluation) == 1


def test_a_driver_and_shards_whose_board_is_another_drivers_learn_it_and_change_nothing(board: Board) -> None:
    attempt = Attempt("rollout", 0, 1)
    board.start(TOKEN, TOPIC, attempt)
    board.serve(facts(TOKEN + 1))
    board.open(TOKEN + 1, TOPIC)
    calls: dict[str, Callable[[], Any]] = {
        "facts": lambda: board.facts(TOKEN),
        "open": lambda: board.open(TOKEN, TOPIC),
        "close": lambda: board.close(TOKEN, TOPIC),
        "start": lambda: board.start(TOKEN, TOPIC, attempt),
        "give_up": lambda: board.give_up(TOKEN, TOPIC, attempt),
        "tell": lambda: board.tell(TOKEN, TOPIC, BoardState(settled=True), attempt),
        "wait": lambda: board.wait(TOKEN, TOPIC, 0, 0),
        "revision": lambda: board.revision(TOKEN, TOPIC),
    }
    assert calls.keys() == {name for name in vars(Board) if not name.startswith("_")} - {"state", "serve"}
    for call in calls.values():
        with pytest.raises(ShardReplacedError, match="gone"):
            call()
    assert board.wait(TOKEN + 1, TOPIC, 0, 0) == BoardState()


def test_who_waits_gets_an_update_at_once(board: Board) -> None:
    heard: list[BoardState] = []
    waiting = threading.Thread(target=lambda: heard.append(board.wait(TOKEN, TOPIC, 0, 60)))
    waiting.start()
    board.tell(TOKEN, TOPIC, BoardState(released=3))
    waiting.join(timeout=10)
    assert heard == [BoardState(revision=1, released=3)]
    assert board.wait(TOKEN, TOPIC, 1, 0.01) == BoardState(revision=1)


ENDINGS: dict[str, Callable[[Board, Attempt], None]] = {
    "its topic is closed": lambda board, attempt: board.close(TOKEN, TOPIC),
    "its topic is opened again": lambda board, attempt: board.open(TOKEN, TOPIC),
    "it is replaced": lambda board, attempt: board.start(TOKEN, TOPIC, Attempt("rollout", 0, 2)),
    "it is given up": lambda board, attempt: board.give_up(TOKEN, TOPIC, attempt),
    "another driver has the board": lambda board, attempt: board.serve(facts(TOKEN + 1)),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_an_attempt_that_waits_learns_at_once_that_it_counts_no_more(
    board: Board, ending: Callable[[Board, Attempt], None]
) -> None:
    attempt, errors = Attempt("rollout", 0, 1), list[Exception]()
    board.start(TOKEN, TOPIC, attempt)

    def wait() -> None:
        try:
            board.wait(TOKEN, TOPIC, 0, 60, attempt)
        except ShardReplacedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    ending(board, attempt)
    waiting.join(timeout=10)
    assert len(errors) == 1


async def no_engines() -> Dispatcher:
    raise EngineError("there are none here")


class Place:
    """A driver's side of a topic, and shards in the same process."""

    def __init__(self, ctx: IterationContext) -> None:
        self.ctx = ctx
        self.actor = cast(Actor[Board], LocalBoard())
        self.side = DriverSide(ctx, Link(self.actor, TOKEN, TOPIC), ctx.stream, no_engines)

    async def shard(self, number: int, work: Any = "rollout") -> ShardStream:
        attempt = Attempt(work, number, 1)
        await self.side.start(attempt)
        stream = ShardStream(Link(self.actor, TOKEN, TOPIC), attempt, SglangClient)
        await stream.catch_up()
        return stream


@pytest.fixture
async def place(make_config: Callable[..., RunConfig]) -> AsyncIterator[Place]:
    config = make_config(rollout={"max_failed_share": 0.2})
    found = Place(IterationContext(Runtime(config), INDEX, Stream(released=2)))
    await found.side.open()
    yield found
    await found.side.close()


@pytest.mark.timeout(30)
async def test_what_a_shard_writes_reaches_the_driver_and_its_own_number(place: Place) -> None:
    first, second, scoring = await place.shard(0), await place.shard(1), await place.shard(0, "reward")
    await first.tell_landed("rollouts", file("a"))
    await second.tell_landed("rollouts", file("b"))
    await place.side.catch_up()
    assert place.ctx.stream.parts("rollouts") == ["rollouts/a", "rollouts/b"]
    assert [file["path"] for file in place.ctx.parts["rollouts"]] == ["rollouts/a", "rollouts/b"]
    await scoring.catch_up()
    assert scoring.parts("rollouts") == ["rollouts/a"]


@pytest.mark.timeout(30)
async def test_releases_and_the_end_reach_the_shards(place: Place) -> None:
    shard = await place.shard(0)
    while shard.released < 2:
        await shard.catch_up(1)
    await place.ctx.stream.release(4)
    await place.ctx.stream.settle()
    while not shard.settled:
        await shard.catch_up(1)
    assert shard.released == 4


@pytest.mark.timeout(30)
async def test_failures_are_counted_over_all_shards_and_each_sample_once(place: Place) -> None:
    budget = rollout_budget(place.ctx)  # of 8 samples 1.6 may fail
    place.side.count_failures("rollout", budget)
    first, second = await place.shard(0), await place.shard(1)
    await first.tell_landed("rollouts", file("a"), [Failure("rollout", "engine died", "s0")])
    await second.tell_landed("rollouts", file("b"), [Failure("rollout", "engine died", "s0")])
    await place.side.catch_up()
    assert not place.side.over
    await second.tell_landed("rollouts", file("c"), [Failure("rollout", "engine died", "s1")])
    with pytest.raises(BudgetError, match="2 samples failed to generate"):
        await place.side.until_failed()


@pytest.mark.timeout(30)
async def test_an_attempt_that_is_given_up_ends(place: Place) -> None:
    shard = await place.shard(0)
    following = asyncio.create_task(shard.follow())
    await place.side.give_up(Attempt("rollout", 0, 1))
    with pytest.raises(ShardReplacedError):
        await following


@pytest.mark.timeout(30)
async def test_a_shard_that_wants_engines_hears_why_there_are_none(place: Place) -> None:
    shard = await place.shard(0)
    following = asyncio.create_task(shard.follow())
    with pytest.raises(EngineError, match="there are none here"):
        await shard.engines._ask()
    following.cancel()


@pytest.mark.timeout(30)
async def test_what_a_dead_shard_wrote_counts_and_what_it_writes_after_it_was_replaced_does_not(
    place: Place,
) -> None:
    ctx = place.ctx
    attempts = Attempts(ctx, TOPIC, ctx.stream, lambda: ctx.versions, on_ray())

    def write(sample: str) -> str:
        row = sample_of(drawn_group(0), 0, "2", sample_id=sample)
        table: pa.Table = schema.to_table([row], "rollouts")
        return write_part(ctx.folder, "rollouts", table, "rollouts").path

    before = write("s-0000")
    await attempts.take_in_written(place.side, ["rollouts"])
    late = write("s-0001")
    assert place.side.counted("rollouts", [before, late]) == [before, late]  # nothing is counted yet
    await place.side.count_stored("rollouts")
    assert place.side.counted("rollouts", [before, late]) == [before]
    await attempts.remove_strays(place.side, "rollouts")
    assert [file["path"] for file in ctx.parts["rollouts"]] == [before]
    assert ctx.folder.list("rollouts") == [before]
    assert late != before
    replacing = await place.shard(0)
    assert replacing.parts("rollouts") == [before]
