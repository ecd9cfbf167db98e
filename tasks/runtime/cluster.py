"""The Ray cluster of a run, as its driver sees it: joined, joined again when the local head died, left.

Owns the connection and the run's reservation; knows nothing of what the actors do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from millrace.connectors.ray import actors, cluster, placement
from millrace.connectors.storage.local import library_log
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
        self._connecting = False  # a thread does so; it goes on when the task that waits for it is cancelled

    async def join(self) -> None:
        """Be connected. A local head that died is started again; the actors it had are lost and rebuilt."""
        address = self.config.placement.ray_address
        async with self._joining:
            if await asyncio.to_thread(cluster.lost, address):
                log.warning(
                    "the local Ray head died: starting it again; what Ray printed is in %s", library_log()
                )
            await asyncio.to_thread(self._connect)
            cluster.give_back_sigterm()

    def _connect(self) -> None:
        self._connecting = True
        try:
            cluster.start_or_join(self.config.placement.ray_address, self.config.run.name)
        finally:
            self._connecting = False

    async def adopt(self) -> None:
        """Keep the actors that an earlier driver left if this very configuration made them; end the others."""
        await self.join()
        await actors.end_others(self.settings)

    async def places(self, role: str) -> list[placement.Place]:
        """A place for each actor of a role."""
        return await asyncio.to_thread(self._reservation.places, role)

    def kill_actors(self) -> None:
        """Kill the run's actors at once, whatever they do."""
        if self._reaches_actors():
            actors.kill_all()

    async def end_actors(self) -> None:
        """End the run's actors, and give back what was reserved for them."""
        if self._reaches_actors():
            await actors.end()
            await asyncio.to_thread(placement.release)

    def leave(self) -> None:
        """Disconnect. Actors that were not ended stay for the next driver."""
        if not self._connecting:  # Ray aborts the process where it is left while it is joined
            cluster.leave()

    def _reaches_actors(self) -> bool:
        return (
            not self._connecting and cluster.joined() and not cluster.lost(self.config.placement.ray_address)
        )
