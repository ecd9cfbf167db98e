"""The live parts of a run: trainer ranks, engines, scoring workers, prompts. All are caches of storage.

Owns bringing them to a weight version, from whatever is left of them: actors that outlived a driver are taken up again,
lost ones are rebuilt from the newest complete checkpoint and the committed batches after it. Knows nothing of flows.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from connectors.huggingface.tokenizer import PromptTokenizer
from connectors.megatron.rank import TrainerRank
from connectors.ray import actors, cluster
from connectors.sglang.dispatcher import Dispatcher
from connectors.sglang.fleet import Fleet
from connectors.sglang.process import EngineServer
from connectors.storage.run_folder import RunFolder
from connectors.workers.pool import Outcome, WorkerPool
from core.config import RunConfig
from core.config.training import EvalSet
from core.errors import TrainerError
from core.ledger import Ledger
from core.rewards.scoring import score_sample
from tasks.catalogue import Catalogue, PromptSet, load_prompts
from tasks.records import record_storage

log = logging.getLogger(__name__)


class Live:
    """Everything of one run that holds memory, in the process that drives it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.run_folder = RunFolder(config.storage.root, config.run.name)
        self.record_storage = record_storage(config.storage.root)
        self.first_version = (
            0  # weight version at which this process began; the guard looks at the step after it
        )
        self._trainer: actors.ActorGroup | None = None
        self._fleet: Fleet | None = None
        self._trainer_lock = asyncio.Lock()
        self._engines_lock = asyncio.Lock()
        self._pool: WorkerPool | None = None
        self._ledger: Ledger | None = None
        self._held_out: dict[str, PromptSet] = {}
        self._folder = Path(
            tempfile.mkdtemp(prefix=f"millrace-{config.run.name}-", dir=_shared_memory(config))
        )

    # prompts and scoring

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """Tokenizer and chat template of the model."""
        return PromptTokenizer.load(self.config.model)

    @cached_property
    def prompts(self) -> Catalogue:
        """The usable training prompts."""
        return Catalogue(self.config, self.tokenizer)

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
            self._ledger = Ledger(self.config.run.seed, sources, shuffle=self.config.data.shuffle)
        return self._ledger.extend(self.run_folder.history())

    async def score(self, row: dict[str, Any]) -> Outcome:
        """Score one sample in a worker process."""
        if self._pool is None:
            self._pool = WorkerPool(self.config.reward.workers)
        reward = self.config.reward
        return await self._pool.call(
            score_sample, reward.function, reward.options, row, timeout_s=reward.timeout_s
        )

    # trainer

    async def trainer(self, version: int) -> actors.ActorGroup:
        """The trainer ranks, holding weight version `version` or a later one of the same iteration."""
        async with self._trainer_lock:
            group = self._trainer or await actors.attach(
                self.config, "trainer", self.config.trainer.world_size
            )
            held = await _versions(group) if group else set()
            if (
                group
                and len(held) == 1
                and version <= next(iter(held)) <= version + self.config.steps_per_iteration
            ):
                self._trainer = group
                return group
            if group:
                log.warning(
                    "trainer ranks hold versions %s, %d is wanted: rebuilding them",
                    sorted(held, key=str),
                    version,
                )
                await actors.end(self.config, "trainer")
            self._trainer = await self._build_trainer(version)
            return self._trainer

    async def _build_trainer(self, version: int) -> actors.ActorGroup:
        """New ranks, brought to `version` by the newest complete checkpoint and replay."""
        started = time.perf_counter()
        world = self.config.trainer.world_size
        group = await actors.create(self.config, "trainer", TrainerRank, world)
        master = await group.call_one(0, "address")
        await group.call("setup", master)
        built = time.perf_counter()
        held = 0
        usable = [
            done
            for done in await asyncio.to_thread(self.run_folder.complete_checkpoints)
            if done * self.config.steps_per_iteration <= version
        ]
        if usable:
            url = self.run_folder.store.url_of(self.run_folder.checkpoint_path(usable[-1]))
            held = (await group.call("load", url))[0]
        loaded = time.perf_counter()
        for replayed in range(held + 1, version + 1):
            iteration = (replayed - 1) // self.config.steps_per_iteration
            batch = self.run_folder.iteration(iteration).url_of("batch.parquet")
            await group.call("train", replayed, batch, None)
        now = {await_ for await_ in await _versions(group)}
        if now != {version}:
            raise TrainerError(f"after load and replay the trainer ranks hold versions {now}, not {version}")
        log.info(
            "trainer at version %d: built in %.1f s, checkpoint %s loaded in %.1f s, %d steps replayed in %.1f s",
            version,
            built - started,
            usable[-1] if usable else None,
            loaded - built,
            version - held,
            time.perf_counter() - loaded,
        )
        return group

    # engines

    async def engines(self, version: int) -> Dispatcher:
        """A dispatcher over engines that have all confirmed `version`; publishes it to those that have not."""
        async with self._engines_lock:
            fleet = await self._ensure_fleet()
            if await fleet.unconfirmed(version):
                await self._publish(fleet, version)
            return fleet.dispatcher(version)

    async def publish(self, version: int) -> dict[str, float]:
        """Bring every engine to the trainer's weights of `version`; seconds by phase."""
        async with self._engines_lock:
            return await self._publish(await self._ensure_fleet(), version)

    async def _publish(self, fleet: Fleet, version: int) -> dict[str, float]:
        trainer = await self.trainer(version)
        directory = self._folder / f"weights-{version:08d}"
        started = time.perf_counter()
        await trainer.call("export", str(directory), version)
        exported = time.perf_counter()
        phases = await fleet.publish(str(directory), version)
        for old in self._folder.glob("weights-*"):
            if old != directory:
                shutil.rmtree(old)
        return {"export": exported - started, **phases}

    async def _ensure_fleet(self) -> Fleet:
        if self._fleet is None:
            self._fleet = Fleet(
                self.config, lambda index: actors.get_or_create(self.config, "engine", EngineServer, index)
            )
        await self._fleet.ensure(self.config.model.path)
        return self._fleet

    # life

    async def open(self, first: int) -> None:
        """Join Ray to drive the run from iteration `first` on."""
        self.first_version = first * self.config.steps_per_iteration
        await cluster.start_or_join(self.config)

    async def close(self, end_actors: bool) -> None:
        """Leave; with `end_actors` the run's actors end too, else they stay for the next driver."""
        if self._pool:
            self._pool.close()
        if self._fleet:
            await self._fleet.close()
        if end_actors:
            await actors.end(self.config)
            shutil.rmtree(self._folder, ignore_errors=True)


async def _versions(group: actors.ActorGroup) -> set[int | None]:
    return {state["version"] for state in await group.states()}


def _shared_memory(config: RunConfig) -> str | None:
    if config.sync.directory:
        return config.sync.directory
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
