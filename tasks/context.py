"""What every task of an iteration gets: configuration, folder, runtime, stream, and the records of the tasks before it."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import pyarrow as pa

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.storage.files import FileEntry, recorded
from millrace.connectors.storage.parts import list_parts, read_parts
from millrace.connectors.storage.run_folder import TRACES, RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.sample import EvaluatedSample
from millrace.core.contracts.task_records import (
    FileRecord,
    IterationRecords,
    ReusedGroup,
    RewardRecord,
    RolloutRecord,
)
from millrace.core.contracts.topics import EvaluationTopic
from millrace.core.sharding import WHOLE, Share
from millrace.tasks.batching.row_sources import LandedParts
from millrace.tasks.stream import STREAMED, Kind, Stream
from millrace.tasks.times import Times

if TYPE_CHECKING:
    from millrace.tasks.runtime.runtime import Runtime

PROMPTS = "prompts.parquet"


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


class EvaluationShards(Protocol):
    """Makes shards produce the samples of an evaluation."""

    async def make(
        self, evaluation: EvaluationTopic, made: Mapping[tuple[str, int], EvaluatedSample]
    ) -> dict[tuple[str, int], EvaluatedSample]:
        """All samples of all sets, by prompt and index. made: samples that an earlier attempt stored."""
        ...


class IterationContext:
    """One iteration of one run. `index` counts from 0. Nobody sets its attributes; tasks add to its collections."""

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        stream: Stream | None = None,
        *,
        share: Share = WHOLE,
        in_shard: bool = False,
    ) -> None:
        """share: the groups that this process generates. in_shard: whether it is a shard, whose driver has the iteration."""
        self.config: RunConfig = runtime.config
        self.index = index
        self.runtime = runtime
        self.share = share
        self.in_shard = in_shard
        self.stream = stream or Stream(released=0, joined=None, limit=self.config.run_limit)
        self.shards: Sharded | None = None  # None: rollout and reward work here
        self.evaluation_shards: EvaluationShards | None = None  # None: evaluations are made here
        self.run_folder: RunFolder = runtime.run_folder
        self.folder: Store = self.run_folder.iteration(index)
        self.landed = LandedParts(self.folder)
        self.records: IterationRecords = {}  # committed so far
        self.times = Times()
        # while their task runs
        self.parts: dict[str, list[FileRecord]] = {
            "rollouts": [],
            "turns": [],
            "rewards": [],
            "evaluations": [],
        }

    def working_in(
        self, shards: Sharded | None = None, evaluation_shards: EvaluationShards | None = None
    ) -> Self:
        """The same iteration, with the same collections, whose work these shards do."""
        made = copy.copy(self)
        made.shards, made.evaluation_shards = shards, evaluation_shards
        return made

    def add_record(self, task: str, record: object) -> None:
        """Keep the record of a task that is committed."""
        cast(dict[str, Any], self.records)[task] = record

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
            await self.stream.land(kind, entry.path)

    def note_failure(self, budget: str, reason: str, sample: str) -> None:
        """Report a failed sample, if the budget of this name is also counted in another process."""

    async def engines_at(self, versions: VersionRange) -> Dispatcher:
        """A dispatcher over the engines, each at one of these versions."""
        return await self.runtime.memory.for_engines(versions)

    @property
    def worked(self) -> dict[str, tuple[float, float]]:
        """Start and end of each task in this process, and of waits at their starts, as `Times.worked` says."""
        rollout = self.records.get("rollout")
        return self.times.worked(rollout["engines_s"] if rollout else 0.0)

    @property
    def worked_at(self) -> dict[str, list[float]]:
        """The same in seconds of the epoch, by this host's clock, to the millisecond."""
        offset = time.time() - time.perf_counter()
        return {name: [round(moment + offset, 3) for moment in span] for name, span in self.worked.items()}

    @property
    def trace(self) -> str | None:
        """The folder in storage for this iteration's traces; None: it is not traced."""
        if iteration_number(self.index) != self.config.tracking.trace:
            return None
        return self.run_folder.store.url_of(f"{TRACES}/{self.index:06d}")

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
    def released_at_first(self) -> int:
        """Groups of the draw that are generated before any is dropped."""
        return self.records["sample_prompts"].get("released", self.fresh_groups)

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
