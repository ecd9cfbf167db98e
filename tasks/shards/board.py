"""The state that a run's driver and its shards share, one for each topic, and the actor that keeps it: the board.

Storage is the truth. What passes here are hints: that a part landed, how many groups may be generated, which engines serve. A
state only grows. An update is a State of what is new; updates are merged, so neither their order nor a repetition matters, and a
late reader has what all others have. The board also decides which attempt of a shard counts. It holds no samples; if it is lost, a
new one is filled from storage.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace.connectors.engines.dispatcher import EngineAddress
from millrace.connectors.ray import actors, placement
from millrace.connectors.ray.actors import Actor
from millrace.connectors.ray.task_runs import NotBegunError, run_on_ray
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.core.config.placement import is_clients
from millrace.core.contracts.task_records import FileRecord
from millrace.core.contracts.topics import Topic
from millrace.core.errors import ActorLostError, MillraceError
from millrace.core.sharding import Share
from millrace.core.waits import Limit
from millrace.tasks.runtime.cluster import Cluster
from millrace.tasks.runtime.prompts import Prompts
from millrace.tasks.stream import Kind

BOARD = "board"  # role of its actor
CALL_S = 10.0  # longest wait for an update in one call
IMPORTS = (  # of the processes that work for shards; a tokenizer's take a second
    "millrace.tasks.shards.shard",
    "transformers.tokenization_utils_tokenizers",
)
REACH_S = 60.0  # for an empty task to start on a node: Prefect's client tries for minutes if nothing answers
SPARE_THREADS = 16  # for calls that do not wait

Work = Literal["rollout", "reward", "evaluate"]
Item = TypeVar("Item")
P = ParamSpec("P")
Result = TypeVar("Result")


class ShardReplacedError(MillraceError):
    """The driver no longer waits for this attempt of a shard: it made another, gave the work up, or is gone."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of one shard at one kind of work. No two of a driver have one number, though the board was made again between them."""

    work: Work
    shard: int
    number: int


@dataclass(frozen=True)
class ShardCall:
    """What a shard is asked to do: references only."""

    token: int  # of the driver's lease
    topic: Topic
    attempt: Attempt
    share: Share
    versions: VersionRange  # of the weights that generate
    limit: Limit  # of the board: how long nothing may move in a call


@dataclass(frozen=True)
class Part:
    """A part in storage."""

    kind: Kind
    path: str
    shard: int | None = (
        None  # that wrote it, and whose number reads it; None: the driver listed it, and all read it
    )
    file: FileRecord | None = field(default=None, hash=False)  # if a shard wrote it


@dataclass(frozen=True)
class Failure:
    """A sample that could not be generated or scored."""

    budget: str  # that counts it
    reason: str
    sample: str


@dataclass(frozen=True)
class LostEngine:
    """An engine that lost a request."""

    engine_id: str
    url: str
    reason: str
    stalled: bool


@dataclass(frozen=True)
class EngineRequest:
    """An attempt needs engines, for the first time or after it lost some."""

    attempt: Attempt
    number: int
    lost: tuple[LostEngine, ...] = ()


@dataclass(frozen=True)
class EngineReply:
    """The driver's answer to a request. reason: why there are no engines."""

    attempt: Attempt
    number: int
    reason: str | None = None


@dataclass(frozen=True)
class EnginesState:
    """The engines, as the driver last said. The largest number is the newest."""

    number: int = 0
    serving: tuple[EngineAddress, ...] = ()
    replies: tuple[EngineReply, ...] = ()  # to all requests so far
    updates: int = 0  # how often they were given other weights
    updates_amid: int = 0  # of these, how often they kept their requests
    updating: bool = False  # they are given weights now: no shard sends a request


@dataclass(frozen=True)
class Idle:
    """An attempt sends no request while engines are given weights for this time."""

    attempt: Attempt
    update: int


@dataclass(frozen=True)
class BoardState:
    """What is known of a topic, or an update of it: what is new. `merge` says how each field grows."""

    revision: int = 0  # updates so far
    # the driver's
    released: int = 0  # groups of the draw that may be generated
    deferred: int | None = None  # groups that the iteration before deferred; None: it has not generated yet
    settled: bool = False  # the batch is filled
    engines: EnginesState = EnginesState()
    # the driver's and the shards'
    parts: tuple[Part, ...] = ()
    # the shards'
    failures: tuple[Failure, ...] = ()
    requests: tuple[EngineRequest, ...] = ()
    idle: tuple[Idle, ...] = ()


def merge(states: Sequence[BoardState]) -> BoardState:
    """All that these say, in any order, however often one is among them."""
    deferred = [each.deferred for each in states if each.deferred is not None]
    return BoardState(
        revision=max(each.revision for each in states),
        released=max(each.released for each in states),
        deferred=max(deferred, default=None),
        settled=any(each.settled for each in states),
        engines=max((each.engines for each in states), key=lambda engines: engines.number),
        parts=_all(each.parts for each in states),
        failures=_all(each.failures for each in states),
        requests=_all(each.requests for each in states),
        idle=_all(each.idle for each in states),
    )


def _all(found: Iterable[tuple[Item, ...]]) -> tuple[Item, ...]:
    """Each item once, in the order in which they came first."""
    return tuple(dict.fromkeys(chain.from_iterable(found)))


@dataclass(frozen=True)
class Facts:
    """What a shard needs to know of its run besides the configuration."""

    settings: Mapping[str, Any]  # the configuration, as actors get it
    environment: Mapping[str, str]
    folder: str  # that the driver works in
    token: int  # of its lease
    run_id: str
    tokenizer_kind: str


class Board:
    """The states of one driver's topics. Lives in an actor with a thread for each call that waits."""

    def __init__(self, config: Mapping[str, Any], index: int, count: int) -> None:
        self._changed = threading.Condition()
        self._facts: Facts | None = None
        self._updates: dict[Topic, list[BoardState]] = {}
        self._attempts: dict[tuple[Topic, Work, int], int] = {}  # that count, by shard

    def state(self) -> dict[str, Any]:
        """Nothing to report."""
        return {}

    def serve(self, facts: Facts) -> None:
        """Belong to a driver from now on, and forget the topics of an earlier one."""
        with self._changed:
            self._facts = facts
            self._updates.clear()
            self._attempts.clear()
            self._changed.notify_all()

    def facts(self, token: int) -> Facts:
        """The facts of the run. Raises ShardReplacedError if another driver has the board."""
        with self._changed:
            if self._facts is None or self._facts.token != token:
                raise ShardReplacedError("the driver that started this shard is gone")
            return self._facts

    def open(self, token: int, topic: Topic) -> None:
        """Start a topic, of which nothing is known. No attempt at it counts until it starts."""
        with self._changed:
            self.close(token, topic)
            self._updates[topic] = []

    def close(self, token: int, topic: Topic) -> None:
        """Forget a topic."""
        with self._changed:
            self.facts(token)
            self._updates.pop(topic, None)
            self._attempts = {key: number for key, number in self._attempts.items() if key[0] != topic}
            self._changed.notify_all()

    def start(self, token: int, topic: Topic, attempt: Attempt) -> None:
        """From now on this attempt of its shard counts, and no other."""
        with self._changed:
            self._of(token, topic)
            self._attempts[topic, attempt.work, attempt.shard] = attempt.number
            self._changed.notify_all()

    def give_up(self, token: int, topic: Topic, attempt: Attempt) -> None:
        """Have this attempt count no more; a later one of its shard still counts."""
        with self._changed:
            self._of(token, topic)
            key = topic, attempt.work, attempt.shard
            if self._attempts.get(key) == attempt.number:
                del self._attempts[key]
                self._changed.notify_all()

    def tell(self, token: int, topic: Topic, update: BoardState, attempt: Attempt | None = None) -> None:
        """Add an update. attempt: who tells it. Raises ShardReplacedError if it does not count."""
        with self._changed:
            updates = self._of(token, topic, attempt)
            updates.append(replace(update, revision=len(updates) + 1))
            self._changed.notify_all()

    def wait(
        self, token: int, topic: Topic, seen: int, timeout_s: float, attempt: Attempt | None = None
    ) -> BoardState:
        """What came after revision `seen`; waits so long for it. attempt, and what it raises: as of `tell`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                updates = self._of(token, topic, attempt)
                left = deadline - time.monotonic()
                if len(updates) > seen or left <= 0:
                    return merge([BoardState(revision=seen), *updates[seen:]])
                self._changed.wait(left)

    def revision(self, token: int, topic: Topic) -> int:
        """The number of updates so far."""
        with self._changed:
            return len(self._of(token, topic))

    def _of(self, token: int, topic: Topic, attempt: Attempt | None = None) -> list[BoardState]:
        self.facts(token)
        if topic not in self._updates:
            raise ShardReplacedError(f"{topic} is not open")
        if attempt and self._attempts.get((topic, attempt.work, attempt.shard)) != attempt.number:
            raise ShardReplacedError(
                f"the driver does not wait for this attempt of shard {attempt.shard} of {attempt.work} any more"
            )
        return self._updates[topic]


@dataclass(frozen=True)
class Link:
    """A driver's or a shard's connection to the state of one topic."""

    board: Actor[Board]
    token: int  # of the driver's lease
    topic: Topic

    async def call(
        self,
        method: Callable[Concatenate[Board, int, Topic, P], Result],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Result:
        """Call a method of the board about the topic. Raises ActorLostError if the board is gone, else what the method raises."""
        return await self.board.call(method, self.token, self.topic, *args, **kwargs)


@task(name="reach_server", cache_policy=NO_CACHE)
async def reach_server(_: None) -> None:
    """Does nothing: that it starts shows that Prefect's server answers there."""


class BoardKeeper:
    """The driver's hold on the board, which is found or made when the first iteration needs it; and where shards go."""

    def __init__(self, config: RunConfig, cluster: Cluster, prompts: Prompts) -> None:
        self.token = 0
        self.attempts = count(1)  # a shard that starts late must not pass for one of a later board
        # of each open topic: within it no shard sends a request
        self.pauses: list[Callable[[bool], AbstractAsyncContextManager[None]]] = []
        self._config, self._cluster, self._prompts = config, cluster, prompts
        self._run_id = ""
        self._board: Actor[Board] | None = None
        self._making = asyncio.Lock()
        self._asked: dict[str, str | None] = {}  # by node: why Prefect cannot start a task there

    def drive_as(self, token: int, run_id: str) -> None:
        """Belong to the driver with this token."""
        self.token, self._run_id = token, run_id

    async def board(self) -> Actor[Board]:
        """The board. If it does not answer, a new one, which knows nothing."""
        async with self._making:
            if self._board is not None:
                try:
                    await self._board.state()
                except ActorLostError:
                    self._board = None
            if self._board is None:
                await self._cluster.join()
                found = await self._cluster.find_alive(BOARD, 0, Board)
                board = found or await self._make()
                facts = await asyncio.to_thread(self._facts)  # the tokenizer may have to be loaded for it
                await board.call(Board.serve, facts)
                self._board = board
            return self._board

    @contextlib.asynccontextmanager
    async def weights_change(self) -> AsyncIterator[None]:
        """Within, engines may be given other weights: no shard sends a request."""
        amid = self._config.pipeline.on_update == "retract"  # with keep there are no shards
        async with contextlib.AsyncExitStack() as held:
            for pause in list(self.pauses):
                await held.enter_async_context(pause(amid))
            yield

    async def nodes(self) -> list[str]:
        """The nodes of the engines, one each; none where engines run outside the run."""
        if not self._config.engines.started:
            return []
        await self._cluster.join()
        return [place.node for place in await self._cluster.places("engine")]

    async def why_not(self, flow: Context) -> str | None:
        """Why a shard could not start on a node with engines; None if it can on all. flow: as run_on_ray takes it."""
        nodes = await self.nodes()
        unknown = [node for node in dict.fromkeys(nodes) if node not in self._asked]
        reasons = await asyncio.gather(*(self._ask(node, flow) for node in unknown))
        self._asked |= zip(unknown, reasons, strict=True)
        return next((reason for node in nodes if (reason := self._asked[node])), None)

    async def _ask(self, node: str, flow: Context) -> str | None:
        if not is_clients(self._config.placement.ray_address) and node == placement.here().node:
            return None  # this process runs the flow: it reached the server
        with contextlib.suppress(ActorLostError):  # a shard is started elsewhere then
            try:
                async with asyncio.timeout(REACH_S):
                    await run_on_ray(reach_server, None, flow, node, IMPORTS)
            except NotBegunError as error:
                return f"on node {node[:8]}: {error.reason}"
            except TimeoutError:
                return f"on node {node[:8]}: Prefect's server did not answer there for {REACH_S:g} s"
        return None

    async def _make(self) -> Actor[Board]:
        """A board with a thread for each call that waits: of each iteration that is open or waits for one, one a shard of each kind
        of work, and one for each of its two topics."""
        config = self._config
        shards = config.rollout.shards or len(set(await self.nodes())) or 1
        threads = (config.pipeline.ahead + 2) * (len(get_args(Work)) * shards + 2) + SPARE_THREADS
        settings, here = self._cluster.settings, placement.here()
        return actors.make(BOARD, 0, 1, Board, settings, here, limit=config.part_limit, threads=threads)

    def _facts(self) -> Facts:
        return Facts(
            settings=dict(self._cluster.settings),
            environment=actors.passed_environment(self._cluster.settings),
            folder=os.getcwd(),
            token=self.token,
            run_id=self._run_id,
            tokenizer_kind=self._prompts.tokenizer.kind,
        )
