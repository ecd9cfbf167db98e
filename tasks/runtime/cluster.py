"""The Ray cluster of a run, as its driver sees it: joined, joined again when the local head died, left.

Owns the connection and the run's reservation; knows nothing of what the actors do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from millrace.connectors.ray import actors, cluster, placement
from millrace.core.config import RunConfig

log = logging.getLogger(__name__)
T = TypeVar("T", bound=actors.HeldPart)


class Cluster:
    """The cluster that holds the run's actors."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.settings: Mapping[str, Any] = config.for_actors()  # the configuration as actors get it
        self._reservation = placement.Reservation(config)
        self._joining = asyncio.Lock()

    async def join(self) -> None:
        """Be connected. A local head that died is started again; the actors it had are lost and rebuilt."""
        address = self.config.placement.ray_address
        async with self._joining:
            if await asyncio.to_thread(cluster.lost, address):
                log.warning("the local Ray head died: starting it again")
            await asyncio.to_thread(cluster.start_or_join, address, self.config.run.name)

    async def adopt(self) -> None:
        """Keep the actors that an earlier driver left if this very configuration made them; end the others."""
        await self.join()
        await actors.end_others(self.settings)

    async def places(self, role: str) -> list[placement.Place]:
        """A place for each actor of a role."""
        return await asyncio.to_thread(self._reservation.places, role)

    async def leave(self, end_actors: bool) -> None:
        """Disconnect; with `end_actors` the run's actors end, else they stay for the next driver."""
        if end_actors and cluster.joined() and not cluster.lost(self.config.placement.ray_address):
            await actors.end()
            await asyncio.to_thread(placement.release)
        cluster.leave()
