"""The trainer ranks of a run: found or made, asked together, and brought to the weight version that a task asks for.

Owns the only way to a version: newest complete checkpoint, then replay of the committed batches after it; and how the answers of
several ranks become one (`await ranks.each(Rank.save, url)`). Knows nothing of engines: before ranks take GPU memory to be built
or to replay, `before_build` is awaited.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from millrace.connectors.ray import actors
from millrace.connectors.ray.actors import Actor, ActorGroup
from millrace.connectors.ray.placement import ActorPlacement
from millrace.connectors.storage.checkpoint_files import check_marker, set_checkpoint_aside
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.trainers.chosen import make_rank
from millrace.connectors.trainers.rank import Rank, RankState, SaveState
from millrace.core.config import RunConfig
from millrace.core.contracts.progress import starting, waiting
from millrace.core.contracts.task_records import StepMetrics, StepRequest
from millrace.core.errors import ActorLostError, CorruptFileError, MissingFileError, TrainerError
from millrace.core.replay import check_replayed, is_exact
from millrace.core.waits import locked
from millrace.tasks.runtime.cluster import Cluster, check_network
from millrace.tasks.runtime.recovery import Recovery

P = ParamSpec("P")
R = TypeVar("R")
# after one rank has failed in a step, the others fail too or wait for it in a collective
FAILED_ALONE_S = 60.0


class Ranks:
    """The group. Every call raises ActorLostError if a rank is gone, otherwise the error of the first rank that failed."""

    def __init__(self, actors: ActorGroup[Rank]) -> None:
        self._actors = actors

    @property
    def rank_0(self) -> Actor[Rank]:
        """The rank that is asked for what one rank has to do alone."""
        return self._actors.actors[0]

    async def each(
        self, method: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Ask all ranks; the answers in order."""
        return await self._actors.call(method, *args, **kwargs)

    async def together(
        self, method: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Ask all ranks for something in which they wait for each other; rank 0's answer.

        What all ranks refuse can be asked for again. If only some fail, all are ended, since the others would wait for ever.
        """
        return (await self._actors.call_together(FAILED_ALONE_S, method, *args, **kwargs))[0]

    async def setup(self) -> None:
        """Meet at rank 0's address, build the model and hold version 0."""
        address = await self.rank_0.call(Rank.address)
        await self.each(Rank.setup, address)

    async def versions(self) -> set[int | None]:
        """Weight versions that the ranks hold; {None} if a rank is gone. Does not wait for calls under way."""
        try:
            return {state["version"] for state in await self._states()}
        except ActorLostError as error:
            log.warning("%s", error)
            return {None}

    async def saving(self) -> SaveState | None:
        """The newest uncommitted background checkpoint, by the slowest rank. Does not wait for calls under way."""
        states = [state["saving"] for state in await self._states()]
        known = [state for state in states if state is not None]
        if len(known) < len(states) or len({state["url"] for state in known}) > 1:
            return None
        return min(known, key=lambda state: ("failed", "writing", "written").index(state["state"]))

    async def _states(self) -> list[RankState]:
        return cast(list[RankState], await self._actors.states())


log = logging.getLogger(__name__)


class TrainerRanks:
    """The ranks of one run. They are a cache of storage: lost ones are built again."""

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        run_folder: RunFolder,
        before_build: Callable[[], Awaitable[None]],
        recovery: Recovery,
    ) -> None:
        self.config = config
        self._cluster = cluster
        self._run_folder = run_folder
        self._before_build = before_build
        self._recovery = recovery
        self._built: Ranks | None = None
        self._prepared: Ranks | None = None  # new ranks without a model
        self._preparing = False
        self._lock = asyncio.Lock()  # held while ranks are found, built, or brought to a version

    @property
    def is_known(self) -> bool:
        """Whether this driver has built the ranks, or found them, before."""
        return self._built is not None

    async def at(self, version: int, ahead: int = 0) -> Ranks:
        """The ranks, holding weight version `version`, or one of up to `ahead` steps later; built if necessary."""
        async with self._alone():
            await self._cluster.join()
            ranks = self._built or (None if self._prepared else self._existing())
            if ranks:
                versions = await ranks.versions()
                if _reached(versions, version, ahead) or await self._gone_on(ranks, versions, version):
                    self._built = ranks
                    return ranks
                log.warning("trainer ranks hold versions %s, not %d: rebuilding them", versions, version)
            if not self._prepared:
                await self._cluster.end_role("trainer")
            await self._before_build()
            self._built = await self._build(version)
            return self._built

    async def _gone_on(self, ranks: Ranks, versions: set[int | None], version: int) -> bool:
        """Let ranks that are behind repeat the committed steps up to `version`; returns whether they could.

        With iterations ahead, lost engines may have brought the ranks to weights from before a step.
        """
        only = next(iter(versions))
        if len(versions) > 1 or only is None or only > version:
            return False
        steps = self.config.steps_per_iteration
        recorded = await asyncio.to_thread(_are_recorded, self._run_folder, only, version, steps)
        if recorded:
            await self._before_build()
            await replay(ranks, self._run_folder, only, version, steps)
        return recorded

    async def saving(self) -> SaveState | None:
        """The checkpoint that is written while training continues; None without one, or if it was lost with its ranks."""
        async with self._alone():
            await self._cluster.join()
            ranks = self._built or (None if self._prepared else self._existing())
            try:
                return await ranks.saving() if ranks else None
            except ActorLostError as error:
                log.warning("%s", error)
                return None

    def saving_ranks(self) -> Ranks:
        """The ranks that write the checkpoint of `saving`. Raises ActorLostError if they are gone."""
        ranks = self._built or self._existing()
        if ranks is None:
            raise ActorLostError("the ranks are gone that were writing a checkpoint")
        return ranks

    async def prepare(self) -> None:
        """Unless ranks exist, make new ones and do the part of their start that takes no GPU memory."""
        self._preparing = True
        try:
            async with self._alone():
                await self._cluster.join()
                if not self._existing():
                    await self._cluster.end_role("trainer")
                    self._prepared = await self._make_ranks()
                    try:
                        with waiting(log, "the trainer's processes"):
                            await self._prepared.each(Rank.prepare)
                    except ActorLostError:
                        self._prepared = None
                        raise
        finally:
            self._preparing = False

    async def leave_room(self) -> None:
        """Make existing ranks release their GPU memory for an engine that starts; end ranks that cannot."""
        if self._preparing or self._prepared:
            # ranks that are only prepared hold no memory
            return
        ranks = self._built or self._existing()
        try:
            if ranks and None not in await ranks.versions():
                await ranks.each(Rank.offload)
                return
        except ActorLostError as error:
            log.warning("%s", error)
        # a dead driver left them half built, or some are lost
        await self.end()

    async def reload(self) -> None:
        """Let known ranks take their GPU memory back. Lost ranks are rebuilt when a task asks for a version."""
        try:
            if self._built:
                await self._built.each(Rank.reload)
        except ActorLostError as error:
            log.warning("%s", error)

    def _alone(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Within the block, no other task finds, builds or ends ranks."""
        return locked(self._lock, "the trainer, which another task brings up", self.config.run_limit)

    async def end(self) -> None:
        """End the ranks; the next use builds new ones."""
        self._built = None
        await self._cluster.end_role("trainer")

    def _existing(self) -> Ranks | None:
        world, limit = self.config.trainer.world_size, self.config.part_limit
        group = actors.find_group("trainer", world, make_rank, limit=limit)
        return Ranks(group) if group else None

    async def _make_ranks(self) -> Ranks:
        places = await self._cluster.places("trainer")
        check_network(self.config, [place.address for place in places])
        return make_ranks(self.config, self._cluster.settings, places)

    async def _build(self, version: int) -> Ranks:
        """New ranks, brought to `version`."""
        started, count = time.perf_counter(), self.config.trainer.world_size
        ranked = f"{count} rank{'' if count == 1 else 's'}"
        with starting(log, f"the trainer ({ranked} of {self.config.model.path})"):
            ranks, self._prepared = self._prepared or await self._make_ranks(), None
            await ranks.setup()
        setup_s = time.perf_counter() - started
        steps = self.config.steps_per_iteration
        folder = self._run_folder
        result = await bring_up(
            ranks, folder, version, steps, on_broken=partial(set_checkpoint_aside, folder)
        )
        versions = await ranks.versions()
        if versions != {version}:
            raise TrainerError(
                f"after load and replay the trainer ranks hold versions {versions}, not {version}"
            )
        self._recovery.add(find=result.find_s, build=setup_s, load=result.load_s, replay=result.replay_s)
        log.info(
            "trainer at version %d: checkpoint %s loaded in %.1f s, %d steps replayed in %.1f s",
            version,
            result.checkpoint or "none",
            result.load_s,
            version - result.loaded_version,
            result.replay_s,
        )
        return ranks


class OnStep(Protocol):
    """Callback for a replayed step."""

    def __call__(self, index: int, recorded: StepMetrics, again: StepMetrics, *, exact: bool) -> None:
        """index: of the iteration. exact: whether both must be equal bit for bit."""


OnBroken = Callable[[int], object]


@dataclass(frozen=True)
class BringUp:
    """How ranks were brought to a version."""

    checkpoint: int | None  # iterations in the loaded checkpoint; None: the model before step 1
    loaded_version: int
    find_s: float
    load_s: float
    replay_s: float


def make_ranks(config: RunConfig, settings: Any, places: list[ActorPlacement]) -> Ranks:
    """New ranks in their places, without a model."""
    world, limit = config.trainer.world_size, config.part_limit
    ranks = [
        actors.make("trainer", i, world, make_rank, settings, place, limit=limit)
        for i, place in enumerate(places)
    ]
    return Ranks(actors.ActorGroup(ranks))


async def bring_up(
    ranks: Ranks,
    run_folder: RunFolder,
    version: int,
    steps: int,
    *,
    at_most: int | None = None,
    on_step: OnStep = check_replayed,
    on_broken: OnBroken = lambda _: None,
) -> BringUp:
    """Bring ranks that hold version 0 to `version`: newest complete checkpoint, then replay of the batches after it.

    A replayed step uses its recorded settings, if its iteration's train_step is committed.
    steps: optimizer steps an iteration. at_most: the newest version that a checkpoint may hold, `version` when not given.
    on_step: compares a replayed step with the recorded one; raises ReplayedStepError by default if they differ.
    on_broken: gets the number of a checkpoint that is not whole; the previous checkpoint is loaded instead.
    Raises MissingFileError or CorruptFileError for a missing or changed batch or step.json.
    """
    marks = [time.perf_counter()]
    complete = await asyncio.to_thread(run_folder.complete_checkpoints)
    limit = version if at_most is None else at_most
    usable = [done for done in complete if done * steps <= limit]
    marks.append(time.perf_counter())
    checkpoint, loaded = await _load_newest(ranks, run_folder, usable, steps, on_broken)
    marks.append(time.perf_counter())
    with waiting(log, f"steps {loaded + 1} to {version}, which the trainer makes again"):
        await replay(ranks, run_folder, loaded, version, steps, on_step=on_step)
    marks.append(time.perf_counter())
    find_s, load_s, replay_s = (end - start for start, end in zip(marks[:-1], marks[1:], strict=True))
    return BringUp(checkpoint, loaded, find_s, load_s, replay_s)


async def replay(
    ranks: Ranks,
    run_folder: RunFolder,
    loaded: int,
    version: int,
    steps: int,
    *,
    on_step: OnStep = check_replayed,
) -> None:
    """Let ranks that hold `loaded` repeat the steps up to `version`, from the committed batches. Errors as of `bring_up`."""
    exact = True
    for replayed in range(loaded + 1, version + 1):
        index = (replayed - 1) // steps
        files = IterationFiles(run_folder, index)
        recorded = await asyncio.to_thread(recorded_step, files, replayed)
        batch = await asyncio.to_thread(files.entry, "batch.parquet")
        with files.with_remedy():
            url = files.folder.url_of(batch.path)
            step = StepRequest(replayed, url, recorded=recorded, batch_sha256=batch.sha256)
            figures = await ranks.together(Rank.train, step)
        if recorded is not None:
            exact = exact and is_exact(recorded, figures)  # weights differ too after the first inexact step
            on_step(index, recorded, figures, exact=exact)


def _are_recorded(run_folder: RunFolder, held: int, version: int, steps: int) -> bool:
    """Whether every step after `held` up to `version` is committed."""
    indexes = sorted({(made - 1) // steps for made in range(held + 1, version + 1)})
    return all("step.json" in IterationFiles(run_folder, index).entries for index in indexes)


async def _load_newest(
    ranks: Ranks, run_folder: RunFolder, usable: list[int], steps: int, on_broken: OnBroken
) -> tuple[int | None, int]:
    """Load the newest whole one of these checkpoints; returns it and its version, None and 0 without any."""
    for done in reversed(usable):
        url = run_folder.store.url_of(run_folder.checkpoint_path(done))
        try:
            marker = await asyncio.to_thread(check_marker, run_folder, done, done * steps)
            with waiting(log, f"checkpoint {done}, which the trainer loads"):
                loaded = (await ranks.each(Rank.load, url))[0]
            assert loaded == marker["version"], "the ranks load what the marker names"
            return done, loaded
        except (CorruptFileError, MissingFileError) as error:
            log.warning(
                "checkpoint %d is not whole, and the one before it is taken, with replay: %s", done, error
            )
            await asyncio.to_thread(on_broken, done)
    return None, 0


def recorded_step(files: IterationFiles, version: int) -> StepMetrics | None:
    """The metrics of the step that made `version`; None if its iteration's train_step is not committed."""
    if "step.json" not in files.entries:
        return None
    steps: list[StepMetrics] = files.read_json("step.json")["steps"]
    return next(step for step in steps if step["version"] == version)


def _reached(versions: set[int | None], version: int, ahead: int) -> bool:
    only = next(iter(versions))
    return len(versions) == 1 and only is not None and version <= only <= version + ahead
