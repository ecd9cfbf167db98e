"""Who may use GPU memory, and when: the one module that knows both the trainer and the engines.

On shared GPUs (placement.colocate) the two sides take turns, by the state machine of millrace.core.gpu_owner. Otherwise each
side has its own GPUs, and both may work at the same time: then only tasks that ask the trainer for a version take turns.

    async with memory.for_trainer() as trainer:   # engines asleep; the trainer may take everything
        ranks = await trainer.at(version)
        await ranks.together(Rank.train, ...)
    await memory.update_engines(version)          # trainer offloaded; engines have room for weights
    engines = await memory.for_engines(versions)  # trainer offloaded; engines awake, each at one of these versions
    await engines.generate(...)
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.trainers.rank import Rank
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.core.config.pipeline import OnUpdate
from millrace.core.contracts.progress import waiting
from millrace.core.errors import LASTING, TrainerStalledError
from millrace.core.gpu_owner import GpuOwner, Holder, HolderEvent
from millrace.core.waits import locked
from millrace.tasks.runtime.cluster import Cluster
from millrace.tasks.runtime.engines import Engines
from millrace.tasks.runtime.recovery import Recovery
from millrace.tasks.runtime.trainer import Ranks, TrainerRanks
from millrace.tasks.runtime.weight_sync import WeightSync

log = logging.getLogger(__name__)
T = TypeVar("T")
TRACED_STEPS = 64  # of an engine; each is some thousand kernels


class GpuMemory:
    """Hands GPU memory to one side at a time, and makes that side ready for a task."""

    def __init__(
        self, config: RunConfig, cluster: Cluster, run_folder: RunFolder, recovery: Recovery
    ) -> None:
        self.config = config
        self._recovery = recovery
        self._trainer = TrainerRanks(config, cluster, run_folder, self._take_for_trainer, recovery)
        self._engines = Engines(config, cluster, self._make_room)
        self._weights = WeightSync(config)
        self._shared = config.placement.colocate
        # An earlier driver may have left memory with either side: each side releases before the other takes it.
        self._owner = GpuOwner(Holder.HANDING_OVER)
        self._run_folder = run_folder
        self._engines_lock = asyncio.Lock()  # on shared GPUs the trainer's lock too
        self._trainer_lock = asyncio.Lock()  # used on separate GPUs; acquired after the engines' lock
        self._sent: int | None = None  # the version that this driver last sent to all engines

    async def open(self, identity: str) -> None:
        """Create the folder that weights may go through, named by the run's identity."""
        await self._weights.open(identity)

    async def close(self) -> None:
        """Close connections to engines, and remove the folder of weights."""
        await self._engines.close()
        await self._weights.close()

    @contextlib.asynccontextmanager
    async def for_trainer(self) -> AsyncIterator[TrainerRanks]:
        """Within the block, engines on shared GPUs sleep, and the trainer may be built, train and save."""
        async with self._turn() if self._shared else self._trainer_turn():
            await self._take_for_trainer()
            yield self._trainer

    async def hand_to_trainer(self) -> bool:
        """If engines hold shared GPUs, put them to sleep and let the ranks take their memory back; returns whether it did.

        Call it when generation is over, before the task that trains, which waits for it.
        """
        async with self._turn():
            if self._owner.holder is not Holder.ENGINES:
                return False
            await self._take_for_trainer()
            await self._trainer.reload()
            return True

    @property
    def trainer(self) -> TrainerRanks:
        """The trainer, for calls that take no GPU memory."""
        return self._trainer

    @contextlib.asynccontextmanager
    async def for_weights(self, version: int) -> AsyncIterator[Ranks]:
        """Within the block, the ranks hold `version` and their weights may be read. Engines stay unless ranks are built."""
        async with self._turn() if self._shared else self._trainer_turn():
            yield await self._trainer.at(version)

    async def for_engines(self, versions: VersionRange) -> Dispatcher:
        """A dispatcher over engines that have each confirmed one of these versions, and have all their memory.

        Engines with another version get the version that was last sent to all.
        """
        async with self._turn():
            version = versions.nearest(await self._newest_sent())
            fleet = await self._running_fleet(version)
            ranks = await self._offloaded_ranks(version)
            missing = fleet.unconfirmed(versions.newest, versions.oldest)
            if missing:
                with waiting(log, f"weights of version {version} in {len(missing)} engines"):
                    await self._update(fleet, ranks, version, missing, newest=versions.newest)
                # frees the bucket
                await self._offloaded_ranks(version)
            self._record(HolderEvent.ENGINES_WOKE)
            await fleet.wake()
            self._recovery.ready()
            return fleet.dispatcher(
                version, lambda _: self._recover(versions), oldest=versions.oldest, newest=versions.newest
            )

    async def _newest_sent(self) -> int:
        """The version last sent to all engines; under a new driver, the version of the last committed iteration."""
        if self._sent is None:
            done = await asyncio.to_thread(self._run_folder.first_open_iteration)
            return done * self.config.steps_per_iteration
        return self._sent

    async def update_engines(self, version: int) -> dict[str, float]:
        """Bring every engine to the trainer's weights of `version`; seconds by phase.

        On shared GPUs the trainer is offloaded first: its gradients, its optimizer state and the memory that PyTorch caches
        may leave no room for the engines' weights.
        """
        async with self._turn():
            fleet = await self._running_fleet(version)
            started = time.perf_counter()
            ranks = await self._offloaded_ranks(version)
            offload_s = time.perf_counter() - started
            seconds = {"offload": offload_s} if self.config.trainer_offloads else {}
            missing = fleet.unconfirmed(version)
            if missing:
                on_update = self.config.pipeline.on_update if self.config.pipeline.ahead else "finish"
                seconds |= await self._update(
                    fleet, ranks, version, missing, newest=version, on_update=on_update
                )
            self._sent = version
            return seconds

    async def start_trace(self, versions: VersionRange) -> None:
        """Make engines ready, and let each trace its next TRACED_STEPS steps."""
        await self.for_engines(versions)
        async with self._turn():
            await (await self._engines.running()).start_trace(TRACED_STEPS)

    async def store_trace(self, url: str) -> None:
        """Store what engines traced, in a folder in storage."""
        async with self._turn():
            await (await self._engines.running()).store_trace(url)

    async def _recover(self, versions: VersionRange) -> None:
        """Bring every engine back to running at one of these versions, after a request was lost."""
        await self.for_engines(versions)

    async def _take_for_trainer(self) -> None:
        """On shared GPUs, put the engines to sleep: the trainer takes the memory."""
        if not self._shared:
            return
        if self.config.engines_sleep:
            await self._engines.sleep()
        self._record(HolderEvent.ENGINES_SLEPT)
        self._record(HolderEvent.TRAINER_TOOK)

    async def _offloaded_ranks(self, version: int) -> Ranks | None:
        """On shared GPUs, ranks that hold `version` and have offloaded everything but their weights; else None.

        If ranks must be built, every engine is put to sleep.
        """
        if not self._shared:
            return None
        ranks = await self._trainer.at(version)
        if self.config.trainer_offloads:
            await ranks.each(Rank.offload)
        self._record(HolderEvent.TRAINER_OFFLOADED)
        return ranks

    async def _make_room(self) -> None:
        """On shared GPUs, make living ranks release their memory for an engine that starts."""
        if self.config.trainer_offloads:
            await self._trainer.leave_room()
            self._record(HolderEvent.TRAINER_OFFLOADED)

    async def _running_fleet(self, version: int) -> Fleet:
        """The fleet, with every engine running. If all are new, the trainer, whose weights they need, starts at the same time.

        On shared GPUs it is only prepared: a new engine takes a share of the free memory.
        """
        first_start = not self._engines.is_known and not self._trainer.is_known
        if first_start and not await self._engines.exist():
            trainer: Awaitable[Any] = self._trainer.prepare() if self._shared else self._trainer.at(version)
            async with self._trainer_turn():
                fleet, _ = await both(self._engines.running(), trainer)
            return fleet
        return await self._engines.running()

    async def _update(
        self,
        fleet: Fleet,
        ranks: Ranks | None,
        version: int,
        engines: list[int],
        *,
        newest: int,
        on_update: OnUpdate = "finish",
    ) -> dict[str, float]:
        """Bring engines to `version`, or to a version up to `newest` if the trainer has moved on; seconds by phase."""
        self._record(HolderEvent.UPDATE_BEGAN)
        started = time.perf_counter()
        try:
            async with self._trainer_turn():
                if ranks is None and not self._weights.has(version):
                    ranks = await self._trainer.at(version, ahead=newest - version)
                    version = await held(ranks)
                seconds = await self._weights.send(ranks, fleet, version, engines, on_update)
        except TrainerStalledError:
            await self._trainer.end()
            self._record(HolderEvent.TRAINER_DIED)
            raise
        self._recovery.add(sync=time.perf_counter() - started)
        return seconds

    def _turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Within the block, this task owns the engines, and on shared GPUs the trainer too."""
        return locked(self._engines_lock, "the engines, which another task uses", self.config.run_limit)

    def _trainer_turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Within the block, this task owns the trainer; on shared GPUs it owns it already."""
        if self._shared:
            return contextlib.nullcontext()
        return locked(self._trainer_lock, "the trainer, which another task uses", self.config.run_limit)

    def _record(self, event: HolderEvent) -> None:
        if self._shared:
            self._owner = self._owner.after(event)


class StoredWeights(GpuMemory):
    """Engines alone, for a model that is not trained: each holds the folder at `model.path`, under any requested version."""

    async def for_engines(self, versions: VersionRange) -> Dispatcher:
        """A dispatcher over engines that have loaded the folder."""
        version = versions.newest
        async with self._turn():
            fleet = await self._engines.running()
            missing = fleet.unconfirmed(version)
            if missing:
                await fleet.update_weights(self.config.model.path, version, missing)
            await fleet.wake()
            return fleet.dispatcher(version, lambda _: self._recover(versions))


async def held(ranks: Ranks) -> int:
    """The version that all ranks hold."""
    (version,) = await ranks.versions()
    assert version is not None, "the ranks were brought to a version"
    return version


async def both(first: Awaitable[T], second: Awaitable[Any]) -> tuple[T, Any]:
    """Wait for both results. If both fail, a lasting error is raised, and the other is logged."""
    results = await asyncio.gather(first, second, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    errors.sort(key=lambda error: not isinstance(error, LASTING))
    for error in errors[1:]:
        log.error("%s: %s", type(error).__name__, error)
    if errors:
        raise errors[0]
    return results[0], results[1]  # type: ignore[return-value]  # neither is an exception
