"""Engines that serve a folder's weights, without a trainer: for evaluation of a model that nothing trains."""

from __future__ import annotations

from millrace.connectors.sglang.dispatcher import Dispatcher
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.tasks.runtime.cluster import Cluster
from millrace.tasks.runtime.gpu_memory import GpuMemory
from millrace.tasks.runtime.recovery import Recovery


class StoredWeights(GpuMemory):
    """Every engine holds the Hugging Face folder at `model.path`, under whatever version it is asked for."""

    def __init__(
        self, config: RunConfig, cluster: Cluster, run_folder: RunFolder, recovery: Recovery
    ) -> None:
        super().__init__(config, cluster, run_folder, recovery)
        self._folder = config.model.path

    async def for_engines(self, version: int) -> Dispatcher:
        """A dispatcher over engines that have loaded the folder."""
        async with self._turn:
            fleet = await self._engines.running()
            missing = fleet.unconfirmed(version)
            if missing:
                await fleet.update_weights(self._folder, version, missing)
            await fleet.wake()
            return fleet.dispatcher(version, self._recover)
