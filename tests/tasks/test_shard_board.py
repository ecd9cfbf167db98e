"""The board between a driver and its shards: who may write to it, and what reaches whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pyarrow as pa
import pytest

from millrace.connectors.ray.actors import Actor
from millrace.connectors.sglang.dispatcher import Dispatcher
from millrace.connectors.storage.parts import write_part
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.task_records import FileRecord
from millrace.core.errors import BudgetError, EngineError
from millrace.tasks.context import Evaluation, IterationContext
from millrace.tasks.rollout import rollout_budget
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.shards.attempts import Attempts, on_ray
from millrace.tasks.shards.board import (
    Batch,
    Board,
    EnginesReady,
    EnginesWanted,
    Failed,
    Landed,
    Released,
    Settled,
    ShardReplacedError,
    Writer,
)
from millrace.tasks.shards.conversation import Conversation
from millrace.tasks.shards.mirror import Link, MirroredStream
from millrace.tasks.stream import Stream
from tests.support.local_board import TOKEN, LocalBoard, facts
from tests.support.stored_samples import drawn_group, sample_of

INDEX = 1
TOPIC = Batch(INDEX)


def part(name: str) -> FileRecord:
    return FileRecord(path=f"rollouts/{name}", sha256="", size=0, rows=1, table="rollouts")


@pytest.fixture
def board() -> Board:
    found = LocalBoard().board
    found.open(TOPIC)
    return found


def test_an_attempt_that_was_replaced_writes_nothing(board: Board) -> None:
    first, other, second = Writer("rollout", 0, 1), Writer("reward", 0, 2), Writer("rollout", 0, 3)
    board.begin(TOPIC, first)
    board.begin(TOPIC, other)
    board.tell(TOKEN, TOPIC, [Landed("rollouts", part("a"), 0)], first)
    board.begin(TOPIC, second)
    with pytest.raises(ShardReplacedError, match="started again"):
        board.tell(TOKEN, TOPIC, [Landed("rollouts", part("b"), 0)], first)
    board.tell(TOKEN, TOPIC, [Landed("rollouts", part("c"), 0)], second)
    board.tell(TOKEN, TOPIC, [Settled()], other)
    told = board.since(TOKEN, TOPIC, 0, 0)
    assert [each.file["path"][-1] for each in told if isinstance(each, Landed)] == ["a", "c"]


@pytest.mark.parametrize("closed", [False, True])
def test_an_attempt_on_a_topic_that_is_opened_again_is_replaced_and_learns_it(
    board: Board, closed: bool
) -> None:
    before = Writer("rollout", 0, 1)
    board.begin(TOPIC, before)
    if closed:
        board.close(TOPIC)
    board.open(TOPIC)
    with pytest.raises(ShardReplacedError, match="started again"):
        board.since(TOKEN, TOPIC, 0, 0, before)
    board.begin(TOPIC, Writer("rollout", 0, 2))
    with pytest.raises(ShardReplacedError, match="started again"):
        board.tell(TOKEN, TOPIC, [Landed("rollouts", part("a"), 0)], before)
    with pytest.raises(ShardReplacedError, match="started again"):
        board.since(TOKEN, TOPIC, 5, 0, before)


def test_the_batch_of_an_iteration_and_its_evaluation_have_notices_of_their_own(board: Board) -> None:
    evaluation = Evaluation(INDEX, done=INDEX, version=2, task="evaluate_before")
    board.open(evaluation)
    board.tell(TOKEN, evaluation, [Released(3)])
    assert board.since(TOKEN, TOPIC, 0, 0) == []
    assert board.count_notices(TOKEN, evaluation) == 1


def test_a_shard_of_another_driver_learns_that_it_is_gone(board: Board) -> None:
    writer = Writer("rollout", 0, 1)
    board.begin(TOPIC, writer)
    board.serve(facts(TOKEN + 1))
    for call in (
        lambda: board.facts(TOKEN),
        lambda: board.since(TOKEN, TOPIC, 0, 0),
        lambda: board.tell(TOKEN, TOPIC, [Settled()], writer),
    ):
        with pytest.raises(ShardReplacedError, match="gone"):
            call()


def test_who_waits_gets_a_notice_at_once(board: Board) -> None:
    heard: list[Any] = []
    waiting = threading.Thread(target=lambda: heard.extend(board.since(TOKEN, TOPIC, 0, 60)))
    waiting.start()
    board.tell(TOKEN, TOPIC, [Released(3)])
    waiting.join(timeout=10)
    assert heard == [Released(3)]
    assert board.since(TOKEN, TOPIC, 1, 0.01) == []


def test_who_waits_for_an_iteration_that_is_closed_learns_it(board: Board) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            board.since(TOKEN, TOPIC, 0, 60)
        except ShardReplacedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    board.close(TOPIC)
    waiting.join(timeout=10)
    assert len(errors) == 1


async def no_engines() -> Dispatcher:
    raise EngineError("there are none here")


class Talk:
    """A driver's conversation, and shards in the same process."""

    def __init__(self, ctx: IterationContext) -> None:
        assert ctx.stream is not None
        self.ctx = ctx
        self.actor = cast(Actor[Board], LocalBoard())
        self.talk = Conversation(ctx, self.actor, TOKEN, TOPIC, ctx.stream, no_engines)

    async def shard(self, number: int, work: Any = "rollout") -> MirroredStream:
        writer = Writer(work, number, 1)
        await self.talk.begin(writer)
        stream = MirroredStream(Link(self.actor, TOKEN, TOPIC, writer))
        await stream.catch_up()
        return stream


@pytest.fixture
async def place(make_config: Callable[..., RunConfig]) -> AsyncIterator[Talk]:
    config = make_config(rollout={"max_failed_share": 0.2})
    found = Talk(IterationContext(config, INDEX, Runtime(config), Stream(released=2)))
    await found.talk.open()
    yield found
    await found.talk.close()


@pytest.mark.timeout(30)
async def test_what_a_shard_writes_reaches_the_driver_and_its_own_number(place: Talk) -> None:
    first, second, scoring = await place.shard(0), await place.shard(1), await place.shard(0, "reward")
    await first.tell_landed("rollouts", part("a"))
    await second.tell_landed("rollouts", part("b"))
    await place.talk.catch_up()
    assert place.ctx.stream is not None
    assert place.ctx.stream.parts("rollouts") == ["rollouts/a", "rollouts/b"]
    assert [file["path"] for file in place.ctx.parts["rollouts"]] == ["rollouts/a", "rollouts/b"]
    await scoring.catch_up()
    assert scoring.parts("rollouts") == ["rollouts/a"]


@pytest.mark.timeout(30)
async def test_releases_and_the_end_reach_the_shards(place: Talk) -> None:
    shard = await place.shard(0)
    while shard.released < 2:
        await shard.catch_up(1)
    assert place.ctx.stream is not None
    await place.ctx.stream.release(4)
    await place.ctx.stream.settle()
    while not shard.settled:
        await shard.catch_up(1)
    assert shard.released == 4


@pytest.mark.timeout(30)
async def test_failures_are_counted_over_all_shards_and_each_sample_once(place: Talk) -> None:
    budget = rollout_budget(place.ctx)  # of 8 samples 1.6 may fail
    place.talk.count_failures("rollout", budget)
    first, second = await place.shard(0), await place.shard(1)
    await first.tell_failed([Failed("rollout", "engine died", "s0")])
    await second.tell_failed([Failed("rollout", "engine died", "s0")])
    await place.talk.catch_up()
    assert not place.talk.failed
    await second.tell_failed([Failed("rollout", "engine died", "s1")])
    with pytest.raises(BudgetError, match="2 samples failed to generate"):
        await place.talk.until_failed()


@pytest.mark.timeout(30)
async def test_an_attempt_that_is_given_up_ends(place: Talk) -> None:
    shard = await place.shard(0)
    following = asyncio.create_task(shard.follow())
    await place.talk.end(Writer("rollout", 0, 1))
    with pytest.raises(ShardReplacedError):
        await following


@pytest.mark.timeout(30)
async def test_a_shard_that_wants_engines_hears_why_there_are_none(place: Talk) -> None:
    shard = await place.shard(0)
    await place.talk._tell(
        EnginesReady((EnginesWanted(Writer("rollout", 0, 1), 1),), (), "engine-0 is broken")
    )
    asking = asyncio.create_task(shard.engines._ask())
    await asyncio.sleep(0)
    await shard.catch_up(1)
    with pytest.raises(Exception, match="engine-0 is broken"):
        await asking


@pytest.mark.timeout(30)
async def test_what_a_dead_shard_wrote_counts_and_what_it_writes_after_it_was_replaced_does_not(
    place: Talk,
) -> None:
    ctx = place.ctx
    assert ctx.stream is not None
    attempts = Attempts(ctx, TOPIC, ctx.stream, lambda: ctx.versions, on_ray())

    def write(sample: str) -> str:
        row = sample_of(drawn_group(0), 0, "2", sample_id=sample)
        table: pa.Table = schema.to_table([row], "rollouts")
        return write_part(ctx.folder, "rollouts", table, "rollouts").path

    before = write("s-0000")
    await attempts.take_in_written(place.talk, ["rollouts"])
    late = write("s-0001")
    assert place.talk.counted("rollouts", [before, late]) == [before, late]  # nothing is counted yet
    await place.talk.know("rollouts", ctx.parts["rollouts"])
    assert place.talk.counted("rollouts", [before, late]) == [before]
    await attempts.remove_strays(place.talk, "rollouts")
    assert [file["path"] for file in ctx.parts["rollouts"]] == [before]
    assert ctx.folder.list("rollouts") == [before]
    assert late != before
    replacing = await place.shard(0)
    assert replacing.parts("rollouts") == [before]
