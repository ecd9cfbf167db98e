"""The live parts of a run in the process that drives it, wired together. All are caches of storage.

Owns nothing but the wiring: prompts and scoring work here, trainer ranks and engines in Ray actors behind `memory`. Knows nothing
of flows.
"""

import asyncio

from millrace.connectors.prefect.record_storage import RecordStorage, save_record_storage
from millrace.connectors.storage.lease import Lease
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.teachers.served_teacher import ServedTeacher
from millrace.core.config import RunConfig
from millrace.core.fixed_texts import EarlierVersions
from millrace.core.sharding import Share
from millrace.tasks.generation.admission import Places, places_of
from millrace.tasks.runtime.cluster import Cluster
from millrace.tasks.runtime.gpu_memory import GpuMemory
from millrace.tasks.runtime.hints import Hints
from millrace.tasks.runtime.prompts import Prompts
from millrace.tasks.runtime.recovery import Recovery
from millrace.tasks.runtime.scoring import Scoring
from millrace.tasks.runtime.sessions import Sessions
from millrace.tasks.runtime.tracking import Trackers
from millrace.tasks.shards.board import BoardKeeper


class Runtime:
    """Everything of one run that holds memory or connections."""

    def __init__(self, config: RunConfig, memory: type[GpuMemory] = GpuMemory) -> None:
        """memory: brings engines to a version; by default from the trainer."""
        self.config = config
        self.run_folder = RunFolder(config.storage.root, config.run.name)
        self.recovery = Recovery()
        # rounding floor of the model, nats a token; None: not known yet
        self.rounding_floor: float | None = None
        self.earlier_versions = EarlierVersions()
        self.prompts = Prompts(config, self.run_folder)
        self.scoring = Scoring(config)
        server = config.algorithm.teacher_server
        self.teacher = ServedTeacher(server) if server else None
        self.hints = Hints(config, self.scoring, self.prompts) if server else None
        self.sessions = Sessions(config, self.prompts)
        self.tracking = Trackers(config)
        self.memory = memory(config, cluster := Cluster(config), self.run_folder, self.recovery)
        self.board = BoardKeeper(config, cluster, self.prompts)
        self._places: dict[Share, Places] = {}
        self._cluster = cluster
        self._run_id: str | None = None
        self._record_storage: RecordStorage | None = None

    @property
    def record_storage(self) -> RecordStorage:
        """The storage of Prefect's task records. Call `open` first."""
        assert self._record_storage is not None, "open comes first"
        return self._record_storage

    @property
    def run_id(self) -> str:
        """The run's id from run.json. Call `drive_under` first."""
        assert self._run_id is not None, "drive_under comes first"
        return self._run_id

    def places(self, share: Share) -> Places:
        """Places for samples in flight. With rollout.admission=kv all samples of a share have the same, from iteration to iteration."""
        if self.config.rollout.admission == "fixed":
            return places_of(self.config, share)
        return self._places.setdefault(share, places_of(self.config, share))

    def drive_under(self, lease: Lease, run_id: str) -> None:
        """From now on files change and actors end only while this process holds the lease. Actors belong to this run alone."""
        self._run_id = run_id
        self.run_folder.store.fence = lease
        self.run_folder.owner.drive_as(run_id)
        self.board.drive_as(lease.token, run_id)
        self._cluster.use(self.run_folder.identity(run_id), run_id, lease)

    async def open(self) -> None:
        """Join Ray. Actors that an earlier driver left are kept if this very configuration made them.

        Actors of abandoned runs are ended.
        """
        await self.memory.open(self._cluster.identity)
        self._record_storage = await save_record_storage(self.config.storage.root)
        self._record_storage.drive_under(self.run_folder.store.fence, self.run_folder.owner.run_id)
        await self._cluster.adopt()
        await self._cluster.end_orphans()

    async def gpu_busy_share(self, start: float) -> float | None:
        """Share of the time since `start`, seconds of the epoch, in which the run's GPUs worked; None if it is not known."""
        return await self._cluster.gpu_busy_share(start)

    def kill_actors(self) -> None:
        """Kill the run's actors at once, in any call."""
        self._cluster.kill_actors()

    async def close(self, end_actors: bool) -> None:
        """Leave the cluster. With `end_actors` the run's actors end first, else they stay for the next driver."""
        if end_actors:
            await self._cluster.end_actors()
        self.scoring.close()
        self.sessions.close()
        await asyncio.to_thread(self.tracking.close)
        await self.memory.close()
        self._cluster.leave()
