"""How rollout, reward and filter of one iteration notify each other within a process.

Storage is the truth: a task that starts looks there first. Notifications are hints: a part landed, so many
groups may be generated, the filter has all it needs.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from millrace.connectors.storage.files import FileEntry
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample, ScoredSample
from millrace.core.waits import USUAL, Limit, beat, heartbeat, progressing
from millrace.tasks.scoring.scored_group import ScoredGroup

Kind = Literal["rollouts", "turns", "rewards", "evaluations"]
STREAMED: tuple[Kind, ...] = ("rollouts", "rewards")  # other tasks wait for parts of these kinds


@dataclass(frozen=True)
class Joined:
    """Samples deferred to an iteration, by id: finished and unfinished ones, and the scores of finished ones that have one."""

    groups: list[DrawnGroup] = field(default_factory=list)
    finished: dict[str, GeneratedSample] = field(default_factory=dict)
    begun: dict[str, GeneratedSample] = field(default_factory=dict)
    scores: dict[str, ScoredSample] = field(default_factory=dict)
    files: list[FileEntry] = field(default_factory=list)


NOTHING = Joined()


class Stream:
    """Notifications of one iteration.

    Groups are released in the order they were drawn: at first as many as the batch needs, then one more for each
    that was dropped. So the groups ever released are the shortest prefix of the draw that fills the batch,
    in any order of finishing.
    """

    def __init__(self, released: int, joined: Joined | None = NOTHING, limit: Limit = USUAL) -> None:
        """joined: what was deferred to the iteration; None if that is not known yet. limit: for waits without progress."""
        self._limit = limit
        self.released = released
        self.joined = joined
        self.begun = False  # requests go out now, or none is needed
        self.settled = False
        self.settled_at = float("inf")  # time of `settle`, on the clock of time.perf_counter
        self.kept: Sequence[ScoredGroup] = ()
        self.revision = 0
        self._parts: dict[Kind, dict[str, None]] = {kind: {} for kind in get_args(Kind)}
        self._changed = asyncio.Condition()

    def add_listed(self, kind: Kind, paths: Iterable[str]) -> None:
        """Add parts from a listing of storage. The listing task calls it before its first wait."""
        self._parts[kind].update(dict.fromkeys(paths))

    def parts(self, kind: Kind) -> list[str]:
        """Paths of the parts known so far, in the order they became known."""
        return list(self._parts[kind])

    async def land(self, kind: Kind, path: str) -> None:
        """Announce a whole part in storage."""
        self._parts[kind][path] = None
        await self._notify()

    async def release(self, groups: int) -> None:
        """Allow generation up to this many groups of the draw; never fewer than before."""
        if groups > self.released:
            self.released = groups
            await self._notify()

    async def begin(self) -> None:
        """Announce that rollout starts to generate, or need not."""
        self.begun = True
        await self._notify()

    async def until_begun(self) -> None:
        """Wait until rollout starts to generate: earlier work on the event loop would delay its requests."""
        await self._until(lambda: self.begun, "the beginning of the rollout")

    async def join(self, joined: Joined) -> None:
        """Announce what was deferred to the iteration."""
        self.joined = joined
        await self._notify()

    async def until_joined(self) -> Joined:
        """What was deferred to the iteration, once that is known."""
        await self._until(lambda: self.joined is not None, "what the iteration before defers")
        assert self.joined is not None
        return self.joined

    async def keep(self, groups: Sequence[ScoredGroup]) -> None:
        """Announce the first groups of the batch, in its order: more than before."""
        if len(groups) > len(self.kept):
            self.kept = groups
            await self._notify()

    async def settle(self) -> None:
        """Announce that every verdict is known: no more generation or scoring is needed."""
        self.settled, self.settled_at = True, min(self.settled_at, time.perf_counter())
        await self._notify()

    async def wait(self, seen: int) -> int:
        """Wait until something happened after revision `seen`; returns the newest revision."""
        await self._until(lambda: self.revision > seen, "parts of samples and of rewards")
        return self.revision

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for a change after which it holds. Raises StalledError if the run makes no progress."""
        await progressing(self._holds(holds), what, self._limit, heartbeat)

    async def _holds(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _notify(self) -> None:
        beat()
        async with self._changed:
            self.revision += 1
            self._changed.notify_all()
