"""Shards that begin before their iteration: which do, that each hears its own call, and what becomes of those without one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.connectors.ray.actors import Actor
from millrace.core.config import RunConfig
from millrace.core.errors import ActorLostError
from millrace.core.pipeline.sharding import WHOLE
from millrace.core.staleness import VersionRange
from millrace.core.waits.deadline import USUAL
from millrace.tasks.shards.board import Batch, Board, Seat, ShardCall, ShardReplacedError, Work, Writer
from millrace.tasks.shards.early import TASKS, EarlyShards, begins_early
from millrace.tasks.shards.keeper import BoardKeeper
from millrace.tasks.shards.shard import called_to
from tests.support.local_board import TOKEN, LocalBoard, facts
from tests.support.shards_here import until

EVALUATION = {"sets": [{"name": "held_out", "path": "held_out.jsonl"}], "every": 2}


class Keeper:
    """A keeper of a board in this process, with engines on two nodes."""

    def __init__(self, board: LocalBoard) -> None:
        self.token, self.attempts, self.is_there = TOKEN, count(1), True
        self.here = board
        self.fails, self.known = False, 0

    @contextlib.asynccontextmanager
    async def known_nodes(self) -> AsyncIterator[list[str]]:
        if self.fails:
            raise ActorLostError("no cluster")
        self.known += 1
        yield ["a", "b"]
        self.known -= 1

    async def call_to(self, seat: Seat, call: ShardCall | None) -> None:
        await self.here.call(Board.call_to, seat, call)


class Place:
    """Shards that would be Ray tasks."""

    def __init__(self) -> None:
        self.keeper = Keeper(LocalBoard())
        self.begun: list[str] = []  # nodes of those that wait, in their order
        self.ended: list[Any] = []
        self.early = EarlyShards(cast(BoardKeeper, self.keeper), self.run)

    async def run(self, task: Any, asked: ShardCall | Seat, node: str | None) -> Any:
        """Runs a shard, which gives its call back."""
        if isinstance(asked, ShardCall):
            return "begun late", asked
        self.begun.append(f"{task.name} {node}")
        try:
            found = await called_to(cast(Actor[Board], self.keeper.here), asked)
        except BaseException as error:
            self.ended.append(error)
            raise
        return "waited", found

    async def all_wait(self, number: int) -> None:
        await until(lambda: len(self.begun) == number)


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def config(make_config: Callable[..., RunConfig]) -> RunConfig:
    return make_config(placement={"task_runner": "ray"})


def call(work: Work = "rollout", shard: int = 0, attempt: int = 100) -> ShardCall:
    return ShardCall(TOKEN, Batch(1), Writer(work, shard, attempt), WHOLE, VersionRange.only(1), USUAL)


@pytest.mark.timeout(30)
async def test_each_shard_hears_its_own_call(place: Place, config: RunConfig) -> None:
    place.early.begin(config)
    await place.all_wait(4)
    assert place.begun == ["rollout_shard a", "rollout_shard b", "reward_shard a", "reward_shard b"]
    calls = [call(work, shard) for work in TASKS for shard in (1, 0)]
    found = await asyncio.gather(*(place.early.run(TASKS[each.writer.work], each, None) for each in calls))
    assert found == [("waited", each) for each in calls]
    assert place.keeper.known == 1
    await place.early.close()
    assert place.ended == []
    assert place.keeper.known == 0


@pytest.mark.timeout(30)
async def test_one_that_died_is_begun_again_on_its_node(place: Place, config: RunConfig) -> None:
    place.early.begin(config)
    await place.all_wait(4)
    first, second = call(attempt=100), call(attempt=101)
    _, running = place.early._waiting["rollout", 0]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await place.early.run(TASKS["rollout"], first, "a")
    assert await place.early.run(TASKS["rollout"], second, "a") == ("begun late", second)
    await place.early.close()


@pytest.mark.timeout(30)
async def test_those_without_work_end(place: Place, config: RunConfig) -> None:
    place.early.begin(config)
    await place.all_wait(4)
    await place.early.run(TASKS["reward"], call("reward", 1), None)
    await place.early.close()
    assert len(place.ended) == 3


@pytest.mark.timeout(30)
async def test_a_shard_hears_that_there_is_no_work_and_that_its_driver_is_gone(place: Place) -> None:
    board = place.keeper.here
    waiting = asyncio.create_task(board.call(Board.called, Seat(TOKEN, 1, USUAL), 60.0))
    await board.call(Board.call_to, Seat(TOKEN, 1, USUAL), None)
    with pytest.raises(ShardReplacedError, match="no work"):
        await waiting
    waiting = asyncio.create_task(board.call(Board.called, Seat(TOKEN, 2, USUAL), 60.0))
    await asyncio.sleep(0.05)
    board.board.serve(facts(TOKEN + 1))
    with pytest.raises(ShardReplacedError, match="gone"):
        await waiting


async def test_a_shard_asks_again_until_it_is_called(place: Place) -> None:
    seat = Seat(TOKEN, 1, USUAL)
    assert await place.keeper.here.call(Board.called, seat, 0.01) is None
    await place.keeper.call_to(seat, call())
    assert await place.keeper.here.call(Board.called, seat, 0.01) == call()


async def test_without_a_cluster_they_begin_when_they_are_wanted(place: Place, config: RunConfig) -> None:
    place.keeper.fails = True
    place.early.begin(config)
    assert await place.early.run(TASKS["rollout"], call(), None) == ("begun late", call())
    await place.early.close()


@pytest.mark.parametrize(
    ("sections", "index", "there", "early"),
    [
        ({}, 3, True, True),
        ({}, 3, False, False),  # the first iteration of a driver
        ({"placement": {"task_runner": "local"}}, 3, True, False),
        (
            {"pipeline": {"ahead": 1}, "algorithm": {"correction": {"kind": "truncate"}}},
            3,
            True,
            False,
        ),
        ({"evaluation": EVALUATION}, 3, True, True),
        ({"evaluation": EVALUATION}, 4, True, False),  # iterations 1 to 4 are done, and the weights evaluated
        ({"evaluation": {**EVALUATION, "background": True}}, 4, True, True),
    ],
)
def test_which_iterations_have_shards_that_begin_early(
    place: Place,
    make_config: Callable[..., RunConfig],
    sections: dict[str, Any],
    index: int,
    there: bool,
    early: bool,
) -> None:
    place.keeper.is_there = there
    made = make_config(**{"placement": {"task_runner": "ray"}, **sections})
    assert begins_early(made, cast(BoardKeeper, place.keeper), index) is early


async def test_nodes_are_looked_up_once_an_iteration(make_config: Callable[..., RunConfig]) -> None:
    class Cluster:
        asked = 0

        async def join(self) -> None:
            pass

        async def places(self, role: str) -> list[Any]:
            self.asked += 1
            return [SimpleNamespace(node=f"{role} {self.asked}")]

    cluster = Cluster()
    keeper = BoardKeeper(make_config(), cast(Any, cluster), cast(Any, None))
    assert await keeper.nodes() == ["engine 1"]
    first, second = keeper.known_nodes(), keeper.known_nodes()
    assert await first.__aenter__() == await keeper.nodes() == ["engine 2"]
    assert await second.__aenter__() == ["engine 3"]
    await first.__aexit__(None, None, None)  # the next iteration begins before one ends
    assert await keeper.nodes() == ["engine 3"]
    await second.__aexit__(None, None, None)
    assert await keeper.nodes() == ["engine 4"]
