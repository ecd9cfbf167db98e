"""The board of a run: what its driver and its shards tell each other.

Owns the order of the notices on a topic, and which attempt of a shard still counts. A notice is a hint: storage is the truth,
and a board that is lost is made again from it. Holds no samples. Lives in an actor with a thread for each call that waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace.connectors.sglang.dispatcher import EngineAddress
from millrace.core.contracts.task_records import FileRecord
from millrace.core.errors import MillraceError
from millrace.core.pipeline.sharding import Share
from millrace.core.staleness import VersionRange
from millrace.core.waits.deadline import Limit
from millrace.tasks.context import Evaluation
from millrace.tasks.stream import Kind

Work = Literal["rollout", "reward", "evaluate"]


class ShardReplacedError(MillraceError):
    """The driver no longer waits for this attempt of a shard: it made another, gave the work up, or is gone."""


@dataclass(frozen=True)
class Facts:
    """What a shard needs to know of its run besides the configuration."""

    settings: Mapping[str, Any]  # the configuration, as actors get it
    environment: Mapping[str, str]
    folder: str  # that the driver works in
    token: int  # of its lease
    run_id: str
    seed_name: str
    tokenizer_kind: str


@dataclass(frozen=True)
class Batch:
    """The batch of an iteration."""

    index: int


Topic = Batch | Evaluation
"""What a driver and its shards work on: each has notices of its own."""


@dataclass(frozen=True)
class Writer:
    """One attempt of one shard at one kind of work. No two of a driver have one number, though the board was made again between them."""

    work: Work
    shard: int
    attempt: int


@dataclass(frozen=True)
class ShardCall:
    """What a shard is asked to do: references only."""

    token: int  # of the driver's lease
    topic: Topic
    writer: Writer
    share: Share
    versions: VersionRange  # of the weights that generate
    limit: Limit  # of the board: how long nothing may move in a call


@dataclass(frozen=True)
class Seat:
    """Where a shard that was begun early waits for its call. No two of a driver have one number."""

    token: int  # of the driver's lease
    number: int
    limit: Limit  # of the board: how long nothing may move in a call


@dataclass(frozen=True)
class Known:
    """Parts that count, as a listing of storage showed them."""

    kind: Kind
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Landed:
    """A part that a shard wrote."""

    kind: Kind
    file: FileRecord
    shard: int


@dataclass(frozen=True)
class Failed:
    """A sample that could not be generated or scored."""

    budget: str  # that counts it
    reason: str
    sample: str


@dataclass(frozen=True)
class Released:
    """How many groups of the draw may be generated."""

    groups: int


@dataclass(frozen=True)
class DeferralKnown:
    """The iteration before has generated: how many groups it deferred, which storage has."""

    groups: int


@dataclass(frozen=True)
class Settled:
    """The batch is filled."""


@dataclass(frozen=True)
class Ended:
    """The driver does not wait for this attempt any more."""

    writer: Writer


@dataclass(frozen=True)
class EngineLost:
    """A request was lost on an engine."""

    engine_id: str
    url: str
    reason: str
    stalled: bool


@dataclass(frozen=True)
class EnginesWanted:
    """A shard needs engines, for the first time or after it lost some."""

    writer: Writer
    number: int


@dataclass(frozen=True)
class EnginesReady:
    """The answer to those who wanted engines. reason: why there are none."""

    wanted: tuple[EnginesWanted, ...]
    engines: tuple[EngineAddress, ...]
    reason: str | None = None


@dataclass(frozen=True)
class WeightsComing:
    """Engines are given other weights: no shard sends a request until they are ready again. amid: they keep those that they have."""

    number: int
    amid: bool


@dataclass(frozen=True)
class SendsNothing:
    """A shard's answer to WeightsComing."""

    writer: Writer
    number: int


Notice = (
    Known
    | Landed
    | Failed
    | Released
    | DeferralKnown
    | Settled
    | Ended
    | EngineLost
    | EnginesWanted
    | EnginesReady
    | WeightsComing
    | SendsNothing
)


class Board:
    """The notices of one driver, by topic."""

    def __init__(self, config: Mapping[str, Any], index: int, count: int) -> None:
        self._changed = threading.Condition()
        self._facts: Facts | None = None
        self._topics: dict[Topic, list[Notice]] = {}
        self._attempts: dict[tuple[Topic, Work, int], int] = {}
        self._calls: dict[int, ShardCall | None] = {}  # by the number of the seat, until it is heard

    def state(self) -> dict[str, Any]:
        """Nothing of its own."""
        return {}

    def serve(self, facts: Facts) -> None:
        """Belong to a driver from now on, and forget the notices of an earlier one."""
        with self._changed:
            self._facts = facts
            self._topics.clear()
            self._attempts.clear()
            self._calls.clear()
            self._changed.notify_all()

    def facts(self, token: int) -> Facts:
        """The facts of the run. Raises ShardReplacedError where another driver has the board."""
        with self._changed:
            if self._facts is None or self._facts.token != token:
                raise ShardReplacedError("the driver that started this shard is gone")
            return self._facts

    def open(self, topic: Topic) -> None:
        """Begin the notices on a topic, on which no attempt counts until it begins."""
        with self._changed:
            self._topics[topic] = []
            self._attempts = {key: number for key, number in self._attempts.items() if key[0] != topic}
            self._changed.notify_all()

    def close(self, topic: Topic) -> None:
        """Forget a topic."""
        with self._changed:
            self._topics.pop(topic, None)
            self._changed.notify_all()

    def begin(self, topic: Topic, writer: Writer) -> None:
        """Begin an attempt of a shard. From now on the one before it writes nothing here."""
        with self._changed:
            self._of(topic)
            self._attempts[topic, writer.work, writer.shard] = writer.attempt

    def call_to(self, seat: Seat, call: ShardCall | None) -> None:
        """Give the shard at a seat its call; None if there will be none."""
        with self._changed:
            self._calls[seat.number] = call
            self._changed.notify_all()

    def called(self, seat: Seat, timeout_s: float) -> ShardCall | None:
        """The call for a seat; waits so long for it. Raises ShardReplacedError if there will be none."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self.facts(seat.token)
                if seat.number in self._calls:
                    call = self._calls.pop(seat.number)
                    if call is None:
                        raise ShardReplacedError("there is no work for this shard")
                    return call
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def tell(self, token: int, topic: Topic, notices: Sequence[Notice], writer: Writer | None = None) -> None:
        """Append notices. writer: the shard that does so. Raises ShardReplacedError for one that does not count any more."""
        with self._changed:
            found = self._of(topic, token, writer)
            found += notices
            self._changed.notify_all()

    def since(
        self, token: int, topic: Topic, seen: int, timeout_s: float, writer: Writer | None = None
    ) -> list[Notice]:
        """The notices after the first `seen`; waits so long for one. writer, and what it raises: as of `tell`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = self._of(topic, token, writer)
                left = deadline - time.monotonic()
                if len(found) > seen or left <= 0:
                    return found[seen:]
                self._changed.wait(left)

    def count_notices(self, token: int, topic: Topic) -> int:
        """How many notices there are."""
        with self._changed:
            return len(self._of(topic, token))

    def _of(self, topic: Topic, token: int | None = None, writer: Writer | None = None) -> list[Notice]:
        if token is not None:
            self.facts(token)
        found = self._topics.get(topic)
        if found is None:
            raise ShardReplacedError(f"{topic} is not open")
        if writer and self._attempts.get((topic, writer.work, writer.shard)) != writer.attempt:
            raise ShardReplacedError(f"shard {writer.shard} of {writer.work} was started again")
        return found
