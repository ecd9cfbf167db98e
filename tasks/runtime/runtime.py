"""The live parts of a run: trainer ranks, engines, scoring workers, prompts. All are caches of storage.

Owns bringing them to a weight version, from whatever is left of them: actors that outlived a driver are taken up again,
lost ones are rebuilt from the newest complete checkpoint and the committed batches after it. Knows nothing of flows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from functools import cached_property, partial
from typing import Any

import psutil

from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.megatron.rank import TrainerRank
from millrace.connectors.prefect.record_storage import save_record_storage
from millrace.connectors.ray import actors, cluster, placement
from millrace.connectors.sglang.dispatcher import Dispatcher
from millrace.connectors.sglang.external import ExternalEngine
from millrace.connectors.sglang.fleet import Fleet
from millrace.connectors.sglang.process import EngineServer, RouterServer
from millrace.connectors.sglang.weight_update import load_by_broadcast, load_by_ipc
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.workers.pool import Outcome, WorkerPool
from millrace.core.config import RunConfig
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts.ids import derived_seed
from millrace.core.contracts.sample import Scorable
from millrace.core.errors import LASTING, ActorLostError, TrainerError, TrainerStalledError
from millrace.core.ledger import Ledger
from millrace.core.rewards.scoring import score_sample
from millrace.tasks.runtime.network_check import check_reach
from millrace.tasks.runtime.prompt_dataset import PromptDataset, PromptSet, load_prompts
from millrace.tasks.runtime.weights_folder import WeightsFolder

log = logging.getLogger(__name__)


class Runtime:
    """Everything of one run that holds memory, in the process that drives it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.run_folder = RunFolder(config.storage.root, config.run.name)
        self.record_storage: Any = None  # where Prefect keeps task records; set by open
        self.recovery: dict[str, float] = {}  # seconds from this process's start until it works, by phase
        self._reservation = placement.Reservation(config)
        self._trainer: actors.ActorGroup | None = None
        self._ranks: actors.ActorGroup | None = None  # new ones, which hold nothing yet
        self._fleet: Fleet | None = None
        self._trainer_lock = asyncio.Lock()
        self._engines_lock = asyncio.Lock()
        self._ray_lock = asyncio.Lock()
        self._pool: WorkerPool | None = None
        self._credit: WorkerPool | None = None
        self._ledger: Ledger | None = None
        self._held_out: dict[str, PromptSet] = {}
        self.data_since = 0  # iteration from which the sources hold what they hold now
        self.tracker: Any = None  # set when tracking is opened
        self.progress: Any = None
        self._weights: WeightsFolder | None = None  # set by open

    @property
    def _settings(self) -> dict[str, Any]:
        """The configuration as actors get it."""
        return self.config.for_actors()

    # prompts and scoring

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """Tokenizer and chat template of the model."""
        return PromptTokenizer.load(self.config.model)

    @cached_property
    def prompts(self) -> PromptDataset:
        """The usable training prompts."""
        return PromptDataset(self.config, self.tokenizer)

    def held_out(self, held_out: EvalSet) -> PromptSet:
        """The usable prompts of an evaluation set."""
        if held_out.name not in self._held_out:
            limit = self.config.data.max_prompt_tokens
            self._held_out[held_out.name] = load_prompts(held_out, self.tokenizer, limit)
        return self._held_out[held_out.name]

    def ledger(self) -> Ledger:
        """The ledger as the committed manifests tell it."""
        if self._ledger is None:
            sizes = self.prompts.sizes()
            sources = {
                source.name: (source.weight, sizes[source.name]) for source in self.config.data.sources
            }
            seed = self.config.run.seed
            if self.data_since:
                seed = derived_seed(seed, "data", self.data_since)
            self._ledger = Ledger(seed, sources, shuffle=self.config.data.shuffle, first=self.data_since)
        return self._ledger.extend(self.run_folder.history())

    async def score(self, sample: Scorable) -> Outcome:
        """Score one sample in a worker process."""
        if self._pool is None:
            self._pool = WorkerPool(self.config.reward.workers)
        reward = self.config.reward
        return await self._pool.call(
            score_sample, reward.function, reward.options, sample, timeout_s=reward.timeout_s
        )

    @property
    def credit_worker(self) -> WorkerPool:
        """The one process that shapes rewards and computes advantages; it holds torch."""
        if self._credit is None:
            self._credit = WorkerPool(1)
        return self._credit

    # trainer

    async def trainer(self, version: int, ahead: int = 0) -> actors.ActorGroup:
        """The trainer ranks, holding weight version `version`, or one of up to `ahead` steps later."""
        async with self._trainer_lock:
            await self._join()
            group = self._trainer or (None if self._ranks else self._found_ranks())
            if group:
                held = await _versions(group)
                if len(held) == 1 and _reaches(held, version, ahead):
                    self._trainer = group
                    return group
                log.warning("trainer ranks hold versions %s, %d is wanted: rebuilding them", held, version)
            if not self._ranks:
                await actors.end("trainer")
            self._trainer = await self._build_trainer(version)
            return self._trainer

    def _found_ranks(self) -> actors.ActorGroup | None:
        return actors.find_group("trainer", self.config.trainer.world_size)

    async def _make_ranks(self) -> actors.ActorGroup:
        places = await asyncio.to_thread(self._reservation.places, "trainer")
        check_reach(self.config, [place.address for place in places])
        world, settings = self.config.trainer.world_size, self._settings
        return actors.ActorGroup(
            [actors.make("trainer", i, world, TrainerRank, settings, place) for i, place in enumerate(places)]
        )

    async def _prepare_ranks(self) -> None:
        """Unless ranks are there, make new ones and have them do what of their start takes no memory of a GPU."""
        async with self._trainer_lock:
            await self._join()
            if not self._found_ranks():
                await actors.end("trainer")
                self._ranks = await self._make_ranks()
                try:
                    await self._ranks.call("prepare")
                except ActorLostError:
                    self._ranks = None
                    raise

    async def _build_trainer(self, version: int) -> actors.ActorGroup:
        """New ranks, brought to `version` by the newest complete checkpoint and replay of the batches after it.

        On shared GPUs engines leave their memory to them meanwhile; what one still generates is ended, and made again.
        """
        await self._sleep_engines()
        marks = [time.perf_counter()]
        steps = self.config.steps_per_iteration
        group, self._ranks = self._ranks or await self._make_ranks(), None
        master = await group.actors[0].call("address")
        await group.call("setup", master)
        marks.append(time.perf_counter())
        complete = await asyncio.to_thread(self.run_folder.complete_checkpoints)
        usable = [done for done in complete if done * steps <= version]
        marks.append(time.perf_counter())
        held = 0
        if usable:
            held = (
                await group.call(
                    "load", self.run_folder.store.url_of(self.run_folder.checkpoint_path(usable[-1]))
                )
            )[0]
        marks.append(time.perf_counter())
        for replayed in range(held + 1, version + 1):
            batch = self.run_folder.iteration((replayed - 1) // steps).url_of("batch.parquet")
            await group.call("train", replayed, batch, None)
        marks.append(time.perf_counter())
        now = await _versions(group)
        if now != {version}:
            raise TrainerError(f"after load and replay the trainer ranks hold versions {now}, not {version}")
        built, found, loaded, replay = (end - start for start, end in zip(marks[:-1], marks[1:], strict=True))
        if "ready" not in self.recovery:
            self.recovery["find"] = self.recovery.get("find", 0.0) + found
            self.recovery |= {"build": built, "load": loaded, "replay": replay}
        log.info(
            "trainer at version %d: built in %.1f s, checkpoint %s loaded in %.1f s, %d steps replayed in %.1f s",
            version,
            built,
            usable[-1] if usable else "none",
            loaded,
            version - held,
            replay,
        )
        return group

    def ready(self) -> None:
        """Tell that engines or trainer hold what a task asked for: from the first time on, recovery is over."""
        self.recovery.setdefault("ready", time.time() - psutil.Process().create_time())

    # engines

    async def engines(self, version: int) -> Dispatcher:
        """A dispatcher over engines that have all confirmed `version`; publishes it to those that have not.

        On shared GPUs they have all their memory then, and the trainer has left its own to them (placement.offload_trainer).
        """
        async with self._engines_lock:
            fleet = await self._ensure_fleet(version)
            await self._offload_trainer(version)
            missing = fleet.unconfirmed(version)
            if missing:
                await self._publish(fleet, version, missing)
                await self._offload_trainer(
                    version
                )  # the bucket, or all of a rank that was built anew meanwhile
            await fleet.wake()
            self.ready()
            return fleet.dispatcher(version, self._recover)

    async def sleep_engines(self) -> None:
        """On shared GPUs, have engines leave their memory to the trainer until they are next asked for (placement.offload_engines)."""
        if self.config.placement.colocate:
            async with self._engines_lock:
                await self._sleep_engines()

    async def _sleep_engines(self) -> None:
        """Have engines rest, also those that an earlier driver left awake."""
        if not self.config.engines_sleep:
            return
        if self._fleet is None:
            found = await self._living_engines()
            if not found:
                return
            self._fleet = self._new_fleet()
            await self._fleet.attach(found)
        await self._fleet.rest()

    async def _offload_trainer(self, version: int) -> dict[str, float]:
        """On shared GPUs, have a trainer that holds `version` and have it leave all but the weights to the engines.

        One that is built anew for that sends every engine to sleep. Returns the seconds that it took.
        """
        if not self.config.placement.colocate:
            return {}
        trainer = await self.trainer(version)
        if not self.config.trainer_offloads:
            return {}
        started = time.perf_counter()
        await trainer.call("offload")
        return {"offload": time.perf_counter() - started}

    async def publish(self, version: int) -> dict[str, float]:
        """Bring every engine to the trainer's weights of `version`; seconds by phase.

        On shared GPUs the trainer offloads before: beside its gradients, its optimizer and what PyTorch keeps of a step there
        may be no room for the engines' weights.
        """
        async with self._engines_lock:
            fleet = await self._ensure_fleet(version)
            offloaded = await self._offload_trainer(version)
            return offloaded | await self._publish(fleet, version, fleet.unconfirmed(version))

    async def _recover(self, version: int) -> None:
        """Have every engine running and at `version` again, after a request was lost."""
        await self.engines(version)

    async def _publish(self, fleet: Fleet, version: int, engines: list[int]) -> dict[str, float]:
        started = time.perf_counter()
        seconds = await self._hand_over(fleet, version, engines)
        if "ready" not in self.recovery:
            self.recovery["sync"] = time.perf_counter() - started
        return seconds

    async def _hand_over(self, fleet: Fleet, version: int, engines: list[int]) -> dict[str, float]:
        kind, gpus = self.config.sync_kind, self.config.engines.gpus
        if kind == "disk" or not engines:
            directory, exported = await self._exported(version)
            phases = await fleet.publish(directory, version, engines) if engines else {}
            return {"export": exported, **phases}
        seconds: dict[str, float] = {}
        trainer = await self.trainer(version)
        stream = partial(self._buckets, trainer, version, kind == "ipc")
        load = (
            load_by_ipc(stream, gpus, seconds)
            if kind == "ipc"
            else load_by_broadcast(stream, trainer.actors[0].call, gpus, seconds)
        )
        try:
            phases = await fleet.publish(load, version, engines)
        except TrainerStalledError:
            await actors.end("trainer")
            raise
        if self.config.sync.verify:
            directory, _ = await self._exported(version)
            await fleet.verify(directory, version, engines)
        return {**seconds, **phases}

    async def _exported(self, version: int) -> tuple[str, float]:
        """A Hugging Face folder with the trainer's weights of `version`, and the seconds it took."""
        started = time.perf_counter()
        assert self._weights is not None
        if self._weights.version != version:
            await self._weights.take(await self.trainer(version), version)
        return self._weights.url, time.perf_counter() - started

    async def _buckets(
        self, trainer: actors.ActorGroup, version: int, share: bool
    ) -> AsyncIterator[list[Any]]:
        """All ranks' copies of one bucket of the weights after the other; `share`: for other processes on their GPUs."""
        assert self.config.sync.kind != "disk"
        size, number, last = self.config.sync.bucket_mib * 2**20, 0, False
        while not last:
            copies = await trainer.call("bucket", version, number, size, share)
            yield copies
            number, last = number + 1, copies[0].last
        await trainer.call("end_buckets")  # a pass that is given up leaves its bucket to the next

    async def _ensure_fleet(self, version: int) -> Fleet:
        """Have every engine running. Where all are new, the trainer, whose weights they need, is built meanwhile.

        On shared GPUs it is only prepared: a new engine takes its share of the memory that it finds.
        """
        new = self._fleet is None and not self._trainer
        if self._fleet is None:
            self._fleet = self._new_fleet()
        model = self._settings["model"]["path"]
        if new and not await self._engines_there():
            shared = self.config.placement.colocate
            meanwhile = self._prepare_ranks() if shared else self.trainer(version)
            await _both(self._fleet.ensure(model), meanwhile)
        else:
            await self._fleet.ensure(model)
        return self._fleet

    def _new_fleet(self) -> Fleet:
        return Fleet(self.config, self._engine, self._router, self._make_room)

    async def _make_room(self) -> None:
        """On shared GPUs, have ranks that live leave their memory to an engine that starts."""
        if not self.config.trainer_offloads or self._ranks or self._trainer_lock.locked():
            return  # ranks that are only prepared hold none
        group = self._trainer or self._found_ranks()
        try:
            if group and None not in await _versions(group):
                await group.call("offload")
                return
        except ActorLostError as error:
            log.warning("%s", error)
        self._trainer = None
        await actors.end("trainer")  # what a driver that died left half built, or half of which is lost

    async def _engines_there(self) -> bool:
        """Whether an engine outlived an earlier driver, or is run by somebody else."""
        if self.config.engines.kind == "external":
            return True
        return bool(await self._living_engines())

    async def _living_engines(self) -> dict[int, actors.Actor]:
        """Actors of engines that are there, by index."""
        await self._join()
        found = [await actors.find_alive("engine", index) for index in range(self.config.engines.count)]
        return {index: engine for index, engine in enumerate(found) if engine is not None}

    async def _engine(self, index: int) -> actors.Actor | ExternalEngine:
        """What stands for an engine: the actor that is there, or a new one; or an address."""
        if self.config.engines.kind == "external":
            return ExternalEngine(self.config, index)
        await self._join()
        engine = await actors.find_alive("engine", index)
        if engine is not None:
            check_reach(self.config, [(await engine.state())["address"]], served=True)
            return engine
        place = (await asyncio.to_thread(self._reservation.places, "engine"))[index]
        check_reach(self.config, [place.address], served=True)
        return actors.make("engine", index, self.config.engines.count, EngineServer, self._settings, place)

    async def _router(self) -> actors.Actor:
        """The actor of the router: the one that is there, or a new one."""
        await self._join()
        found = actors.find("router", 0)
        return found or actors.make("router", 0, 1, RouterServer, self._settings, placement.here())

    # life

    async def open(self) -> None:
        """Join Ray. Actors that an earlier driver left are kept if they were made by this very configuration."""
        self._weights = await asyncio.to_thread(WeightsFolder, self.config)
        self.record_storage = await save_record_storage(self.config.storage.root)
        await self._join()
        await actors.end_others(self._settings)

    async def _join(self) -> None:
        """Be connected to Ray. A local head that died is started again; the actors it had are lost and rebuilt."""
        address = self.config.placement.ray_address
        async with self._ray_lock:
            if await asyncio.to_thread(cluster.lost, address):
                log.warning("the local Ray head died: starting it again")
            await asyncio.to_thread(cluster.start_or_join, address, self.config.run.name)

    async def close(self, end_actors: bool) -> None:
        """Leave; with `end_actors` the run's actors end too, else they stay for the next driver."""
        for pool in (self._pool, self._credit):
            if pool:
                pool.close()
        if self._fleet:
            await self._fleet.close()
        if end_actors and cluster.joined() and not cluster.lost(self.config.placement.ray_address):
            await actors.end()
            await asyncio.to_thread(placement.release)
        cluster.leave()
        if self._weights:
            await asyncio.to_thread(self._weights.close)


async def _both(*starting: Awaitable[Any]) -> None:
    """Wait for both. Of two errors the one that starting again does not mend is raised, and the other logged."""
    results = await asyncio.gather(*starting, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    errors.sort(key=lambda error: not isinstance(error, LASTING))
    for error in errors[1:]:
        log.error("%s: %s", type(error).__name__, error)
    if errors:
        raise errors[0]


async def _versions(group: actors.ActorGroup) -> set[int | None]:
    """Versions that the ranks hold; {None} if one of them is gone."""
    try:
        return {state["version"] for state in await group.states()}
    except ActorLostError as error:
        log.warning("%s", error)
        return {None}


def _reaches(held: set[int | None], version: int, ahead: int) -> bool:
    found = next(iter(held))
    return found is not None and version <= found <= version + ahead
