"""Moves weights of one version from the trainer's ranks into engines, in the configured way.

Owns the transport: by IPC on shared GPUs, by broadcast from rank 0, or through a folder. Knows nothing of who holds GPU memory:
it gets ranks that hold the version, and running engines.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from millrace.connectors.engines.fleet import Fleet
from millrace.connectors.engines.weight_update import load_by_broadcast, load_by_ipc
from millrace.connectors.trainers.rank import Rank
from millrace.core.config import RunConfig
from millrace.core.config.pipeline import OnUpdate
from millrace.core.contracts.weight_bucket import WeightBucket
from millrace.tasks.runtime.trainer import Ranks
from millrace.tasks.runtime.weights_folder import WeightsFolder


class WeightSync:
    """The transport between trainer and engines of one run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._folder: WeightsFolder | None = None

    async def open(self, identity: str) -> None:
        """Create the folder that weights may go through, named by the run's identity."""
        self._folder = await asyncio.to_thread(WeightsFolder, self.config, identity)

    async def close(self) -> None:
        """Remove the folder."""
        if self._folder:
            await self._folder.close()

    def has(self, version: int) -> bool:
        """Whether engines can be brought to a version without the trainer, because the folder that they load holds it."""
        by_folder = self.config.sync_kind == "disk" or self.config.adapters_by_name
        return by_folder and self._folder is not None and self._folder.version == version

    async def send(
        self,
        ranks: Ranks | None,
        fleet: Fleet,
        version: int,
        engines: list[int],
        on_update: OnUpdate = "finish",
    ) -> dict[str, float]:
        """Bring these engines to `version`, and have each confirm it; seconds by phase. ranks: hold it; None if `has` it.

        on_update: what happens to requests in flight.

        Raises TrainerStalledError if rank 0 does not return from a broadcast: the ranks must then be ended.
        """
        kind, gpus = self.config.sync_kind, self.config.engines.gpus
        if self.config.adapters_by_name:
            directory, export_s = await self._export(ranks, version)
            oldest = version - self.config.pipeline.staleness * self.config.steps_per_iteration
            return {"export": export_s, **await fleet.load_adapters(directory, version, oldest, engines)}
        if kind == "disk":
            directory, export_s = await self._export(ranks, version)
            return {"export": export_s, **await fleet.update_weights(directory, version, engines, on_update)}
        assert ranks is not None, "only a folder stands in for the trainer"
        seconds: dict[str, float] = {}
        stream = partial(self._buckets, ranks, version, kind == "ipc")
        load = (
            load_by_ipc(stream, gpus, seconds)
            if kind == "ipc"
            else load_by_broadcast(stream, ranks.rank_0, gpus, seconds)
        )
        phases = await fleet.update_weights(load, version, engines, on_update)
        return {**seconds, **phases}

    async def _buckets(
        self, ranks: Ranks, version: int, share: bool
    ) -> AsyncIterator[Sequence[WeightBucket]]:
        """Every rank's copy of one bucket after the other; `share`: for other processes on the ranks' GPUs."""
        assert self.config.sync.kind != "disk"
        size, number, last = self.config.sync.bucket_mib * 2**20, 0, False
        while not last:
            copies = await ranks.each(Rank.bucket, version, number, size, share)
            yield copies
            number, last = number + 1, copies[0].last
        # an aborted pass would leave its bucket to the next one
        await ranks.each(Rank.end_buckets)

    async def _export(self, ranks: Ranks | None, version: int) -> tuple[str, float]:
        """A Hugging Face folder with the weights of `version`, and the seconds that writing it took."""
        started = time.perf_counter()
        assert self._folder is not None, "open comes first"
        if self._folder.version != version:
            assert ranks is not None, "the folder holds another version"
            await self._folder.write(ranks, version)
        return self._folder.url, time.perf_counter() - started
