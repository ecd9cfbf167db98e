"""What every task of an iteration gets: configuration, folder, runtime, stream, and the records of the tasks before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.storage.files import FileEntry, recorded
from millrace.connectors.storage.parts import list_parts, read_parts
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.core.contracts.sample import EvaluatedSample
from millrace.core.contracts.task_records import (
    FileRecord,
    IterationRecords,
    ReusedGroup,
    RewardRecord,
    RolloutRecord,
)
from millrace.core.contracts.topics import Evaluation
from millrace.core.sharding import WHOLE
from millrace.tasks.batching.landed_parts import LandedParts
from millrace.tasks.stream import STREAMED, Kind, Stream

if TYPE_CHECKING:
    from millrace.tasks.runtime.runtime import Runtime

PROMPTS = "prompts.parquet"
LEAST_WAIT_S = 0.1  # shorter waits count as part of the task


class Sharded(Protocol):
    """Makes shards do an iteration's rollout and reward."""

    async def rollout(self) -> RolloutRecord:
        """Generate samples until the filter has settled."""
        ...

    async def reward(self) -> RewardRecord:
        """Score samples until the filter has settled."""
        ...

    def counted(self, kind: Kind, listed: Sequence[str]) -> list[str]:
        """The listed parts that count: parts of a replaced shard do not."""
        ...


class ShardedEvaluation(Protocol):
    """Makes shards produce the samples of an evaluation."""

    async def make(
        self, evaluation: Evaluation, made: Mapping[tuple[str, int], EvaluatedSample]
    ) -> dict[tuple[str, int], EvaluatedSample]:
        """All samples of all sets, by prompt and index. made: samples that an earlier attempt stored."""
        ...


class IterationContext:
    """One iteration of one run. `index` counts from 0."""

    def __init__(self, config: RunConfig, index: int, runtime: Runtime, stream: Stream | None = None) -> None:
        self.config = config
        self.index = index
        self.runtime = runtime
        self.stream = stream
        self.shards: Sharded | None = None  # None: rollout and reward work here
        self.evaluation_shards: ShardedEvaluation | None = None  # None: evaluations are made here
        self.in_shard = False  # whether this process is a shard, whose driver has the iteration
        self.share = WHOLE  # the groups that this process generates
        self.mine: frozenset[str] | None = None  # groups that this process scores; None: all
        self.run_folder: RunFolder = runtime.run_folder
        self.folder: Store = self.run_folder.iteration(index)
        self.landed = LandedParts(self.folder)
        self.records: IterationRecords = {}  # committed so far
        self.handed_s: float | None = None  # seconds in which shared GPUs were handed to the trainer early
        self.trainer_s = 0.0  # seconds until ranks were ready to train
        self.seconds: dict[str, float] = {}  # seconds of work outside of tasks, such as early passes
        self.intervals: dict[str, tuple[float, float]] = {}  # start and end of each task, on one clock
        # while their task runs
        self.parts: dict[str, list[FileRecord]] = {
            "rollouts": [],
            "turns": [],
            "rewards": [],
            "evaluations": [],
        }

    def open_stream(self) -> Stream:
        """Start the notifications between the streaming tasks; returns them."""
        record = self.records["sample_prompts"]
        self.stream = Stream(
            record.get("released", self.fresh_groups), joined=None, limit=self.config.run_limit
        )
        return self.stream

    def read_prompts(self, columns: list[str] | None = None) -> pa.Table:
        """The drawn groups in their order. Raises CorruptFileError if they differ from the record."""
        record = self.records.get("sample_prompts")
        named = {entry.path: entry for entry in recorded(record["files"], self.folder.url)} if record else {}
        return self.folder.read_table(PROMPTS, "prompts", named.get(PROMPTS), columns).sort_by("ordinal")

    def start_parts(self, folder: str) -> None:
        """Start the list of a folder's parts with the parts of an earlier attempt."""
        entries = self.folder.entries(list_parts(self.folder, folder))
        self.parts[folder] = [entry.record() for entry in entries]

    def stored_parts(self, folder: str, columns: list[str] | None = None) -> pa.Table:
        """Rows of a folder's parts from an earlier attempt. Broken parts are removed. columns: None for all."""
        return read_parts(self.folder, folder, folder, columns=columns, ignore_incomplete=True)

    def listed_parts(self, folder: str) -> list[str]:
        """Paths of a folder's parts."""
        return list_parts(self.folder, folder)

    async def announce(self, kind: Kind, entry: FileEntry) -> None:
        """Announce a whole part to the tasks that wait for parts of its kind."""
        if kind in STREAMED:
            assert self.stream is not None
            await self.stream.land(kind, entry.path)

    def note_failure(self, budget: str, reason: str, sample: str) -> None:
        """Report a failed sample, if the budget of this name is also counted in another process."""

    async def engines_at(self, versions: VersionRange) -> Dispatcher:
        """A dispatcher over the engines, each at one of these versions."""
        return await self.runtime.memory.for_engines(versions)

    @property
    def worked(self) -> dict[str, tuple[float, float]]:
        """Start and end of each task in this process, on one clock, and of waits at their starts as `trainer` and `engines`.

        Rollout, reward and filter work from the first request on: before it, engines start or take their memory. `train_step`
        works once there are ranks.
        """
        held_up: list[tuple[str, tuple[str, ...], float]] = [("trainer", ("train_step",), self.trainer_s)]
        if "rollout" in self.intervals:
            engines_s = self.records["rollout"]["engines_s"]
            held_up.append(("engines", ("rollout", "reward", "filter"), engines_s))
        found = dict(self.intervals)
        for part, tasks, seconds in held_up:
            if seconds < LEAST_WAIT_S or tasks[0] not in found:
                continue
            started, ended = found[tasks[0]]
            found[part] = started, min(started + seconds, ended)
            for task in (task for task in tasks if task in found):
                start, end = found[task]
                found[task] = min(max(start, found[part][1]), end), end
        return found

    @property
    def eager(self) -> bool:
        """Whether the iteration is trained in chunks, and passes of whole chunks are made while the rest is generated.

        False for an iteration that was drawn before the previous one was trained.
        """
        return self.config.pipeline.eager and self.runtime.prompts.ahead.at(self.index) == 0

    @property
    def reused(self) -> list[ReusedGroup]:
        """Groups of earlier iterations that this one trains again, as sample_prompts chose them; none without a buffer."""
        record = self.records.get("sample_prompts")
        return record.get("reused", []) if record else []

    @property
    def fresh_groups(self) -> int:
        """Groups of the batch that this iteration generates."""
        return self.config.rollout.prompts - len(self.reused)

    @property
    def version_before(self) -> int:
        """Weight version that this iteration trains."""
        return self.index * self.config.steps_per_iteration

    @property
    def versions(self) -> VersionRange:
        """Weight versions that may generate this iteration's samples."""
        ahead = self.runtime.prompts.ahead.at(self.index)
        pipeline, steps = self.config.pipeline, self.config.steps_per_iteration
        oldest = pipeline.sent_before(max(0, self.index - ahead)) * steps
        one = pipeline.on_update == "finish"
        return VersionRange(oldest, oldest if one else pipeline.sent_before(self.index) * steps)

    @property
    def sends(self) -> bool:
        """Whether this iteration's weights are sent to engines."""
        return self.config.pipeline.sent_before(self.index + 1) == self.index + 1

    @property
    def version_after(self) -> int:
        """Weight version that this iteration's last step produces."""
        return (self.index + 1) * self.config.steps_per_iteration
