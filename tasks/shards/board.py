"""The board of a run: what its driver and the shards of its iterations tell each other.

Owns the order of the notices of an iteration, and which attempt of a shard still counts. A notice is a hint: storage is the truth,
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
from millrace.tasks.stream import Kind

Work = Literal["rollout", "reward"]


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


@dataclass(frozen=True)
class Writer:
    """One attempt of one shard at one kind of work."""

    work: Work
    shard: int
    attempt: int


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

    work: Work
    reason: str
    sample: str


@dataclass(frozen=True)
class Released:
    """How many groups of the draw may be generated."""

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


Notice = Known | Landed | Failed | Released | Settled | Ended | EngineLost | EnginesWanted | EnginesReady


class _Iteration:
    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.attempts: dict[tuple[Work, int], int] = {}


class Board:
    """The notices of the open iterations of one driver."""

    def __init__(self, config: Mapping[str, Any], index: int, count: int) -> None:
        self._changed = threading.Condition()
        self._facts: Facts | None = None
        self._iterations: dict[int, _Iteration] = {}

    def state(self) -> dict[str, Any]:
        """Nothing of its own."""
        return {}

    def serve(self, facts: Facts) -> None:
        """Belong to a driver from now on, and forget the notices of an earlier one."""
        with self._changed:
            self._facts = facts
            self._iterations.clear()
            self._changed.notify_all()

    def facts(self, token: int) -> Facts:
        """The facts of the run. Raises ShardReplacedError where another driver has the board."""
        with self._changed:
            if self._facts is None or self._facts.token != token:
                raise ShardReplacedError("the driver that started this shard is gone")
            return self._facts

    def open(self, index: int) -> None:
        """Begin the notices of an iteration. Attempts that were begun before count no more."""
        with self._changed:
            before = self._iterations.get(index)
            self._iterations[index] = _Iteration()
            if before:
                self._iterations[index].attempts = dict(before.attempts)
            self._changed.notify_all()

    def close(self, index: int) -> None:
        """Forget an iteration."""
        with self._changed:
            self._iterations.pop(index, None)
            self._changed.notify_all()

    def begin(self, index: int, work: Work, shard: int) -> Writer:
        """Begin an attempt of a shard. From now on the one before it writes nothing here."""
        with self._changed:
            attempts = self._of(index).attempts
            attempts[work, shard] = attempts.get((work, shard), 0) + 1
            return Writer(work, shard, attempts[work, shard])

    def tell(self, token: int, index: int, notices: Sequence[Notice], writer: Writer | None = None) -> None:
        """Append notices. writer: the shard that does so. Raises ShardReplacedError for one that does not count any more."""
        with self._changed:
            self.facts(token)
            found = self._of(index)
            if writer and found.attempts.get((writer.work, writer.shard)) != writer.attempt:
                raise ShardReplacedError(f"shard {writer.shard} of {writer.work} was started again")
            found.notices += notices
            self._changed.notify_all()

    def since(self, token: int, index: int, seen: int, timeout_s: float) -> list[Notice]:
        """The notices after the first `seen`; waits so long for one."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self.facts(token)
                found = self._of(index).notices
                left = deadline - time.monotonic()
                if len(found) > seen or left <= 0:
                    return found[seen:]
                self._changed.wait(left)

    def told(self, token: int, index: int) -> int:
        """How many notices there are."""
        with self._changed:
            self.facts(token)
            return len(self._of(index).notices)

    def _of(self, index: int) -> _Iteration:
        found = self._iterations.get(index)
        if found is None:
            raise ShardReplacedError(f"the iteration with index {index} is not open")
        return found
