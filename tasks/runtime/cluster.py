"""The driver's connection to the run's Ray cluster: checks the configuration for it, joins it, rejoins it when the local head died.

Owns the connection and the run's reservation; knows nothing of what the actors do. An address identifies a node.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from millrace.connectors.ray import actors, cluster, placement
from millrace.connectors.storage.driven_runs import forget_driven, note_driven
from millrace.connectors.storage.files import Fence
from millrace.core.config import RunConfig
from millrace.core.config.engines import LOOPBACK
from millrace.core.config.placement import is_clients
from millrace.core.errors import ActorLostError, ConfigError, LeaseHeldError
from millrace.core.waits import heartbeat, in_own_thread, locked, progressing
from millrace.tasks.runtime.orphans import driven_run, end_orphans, orphans

log = logging.getLogger(__name__)
T = TypeVar("T", bound=actors.HeldPart)


class Cluster:
    """The cluster that holds the run's actors."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        # the configuration in the form that actors get
        self.settings: Mapping[str, Any] = config.for_actors()
        self._reservation = placement.Reservation(config)
        self.identity = config.run.name  # the namespace of its actors; unique to this run after `use`
        self._driven = driven_run(config, self.identity)
        self._fence: Fence | None = None
        self._joining = asyncio.Lock()
        # whether a thread is connecting; it continues if the task that waits for it is cancelled
        self._connecting = False
        self._killed = False  # the actors were killed, since the run ends
        self._has_gpus = True  # False once no actor had a GPU that can be read

    def use(self, identity: str, run_id: str, fence: Fence) -> None:
        """Work in the namespace of this run alone, and end actors only while the fence lets this process.

        To be called in the flow run of the training run, whose id is noted.
        """
        # imported here: a command first says which server Prefect is to use
        from prefect.runtime import flow_run

        self.identity, self._fence = identity, fence
        self._driven = driven_run(self.config, identity, run_id, flow_run.id)

    async def join(self) -> None:
        """Connect, if not connected. A local head that is dead or silent is restarted; its actors are lost and rebuilt.

        Raises CancelledError once the actors were killed: an asyncio.TaskGroup in which a call to an actor fails forgets that
        it was cancelled, and a retry of the iteration's task would make new actors.
        """
        if self._killed:
            raise asyncio.CancelledError
        address = self.config.placement.ray_address
        limit = self.config.run_limit
        async with locked(self._joining, "the Ray cluster, which another task joins", limit):
            if await asyncio.to_thread(cluster.lost, address):
                log.warning("%s", cluster.what_happened())
            connected = in_own_thread(self._connect)
            await progressing(connected, f"the Ray cluster at {address or 'this host'}", limit, heartbeat)
            cluster.give_back_sigterm()

    def _connect(self) -> None:
        self._connecting = True
        try:
            # before the first actor is made
            note_driven(self._driven)
            cluster.start_or_join(self.config.placement.ray_address, self.identity)
        finally:
            self._connecting = False

    async def adopt(self) -> None:
        """Keep the actors that an earlier driver left if this very configuration made them; end the others."""
        await self.join()
        await self._check_fence()
        await actors.end_others(self.settings)

    async def end_role(self, role: str) -> None:
        """End the run's actors of a role. Raises LeaseHeldError if another driver holds them by now."""
        await self._check_fence()
        await actors.end(role)

    async def find_alive(
        self, role: str, index: int, cls: Callable[[Any, int, int], T]
    ) -> actors.Actor[T] | None:
        """An actor that an earlier driver or this one made, if it answers; an actor that does not answer is ended."""
        await self._check_fence()
        return await actors.find_alive(role, index, cls, limit=self.config.part_limit)

    async def places(self, role: str) -> list[placement.ActorPlacement]:
        """A place for each actor of a role."""
        return await asyncio.to_thread(self._reservation.places, role)

    def kill_actors(self) -> None:
        """Kill the run's actors at once, in any call, unless another driver holds them by now. No new ones are made."""
        self._killed = True
        if self._reaches_actors():
            with contextlib.suppress(LeaseHeldError, ActorLostError):
                if self._fence:
                    self._fence.check()
                actors.kill_all()

    async def end_actors(self) -> None:
        """End the run's actors, and release their resources."""
        if self._reaches_actors():
            try:
                await actors.end()
                await asyncio.to_thread(placement.release)
            except ActorLostError:
                if not cluster.lost(self.config.placement.ray_address):
                    raise
                # the actors ended with their head
            await asyncio.to_thread(forget_driven, self.identity)

    async def gpu_busy_share(self, start: float) -> float | None:
        """Share of the time since `start`, seconds of the epoch, in which kernels ran: the mean of the run's GPUs.

        None without GPUs that can be read, or without a reading since.
        """
        if not self._has_gpus or not self._reaches_actors():
            return None
        found = await actors.gpus_busy(start, time.time())
        self._has_gpus = found is not None
        shares = [busy.total / busy.readings for busy in (found or {}).values()]
        return sum(shares) / len(shares) if shares else None

    async def end_orphans(self) -> None:
        """On the local head: end actors of abandoned runs. Call `join` first."""
        if self.config.placement.ray_address is None:
            for sentence in await end_orphans(await asyncio.to_thread(orphans)):
                log.warning("%s", sentence)

    def leave(self) -> None:
        """Disconnect. Actors that were not ended stay for the next driver."""
        # Ray aborts the process if it is left while it is joined
        if not self._connecting:
            cluster.leave()

    async def _check_fence(self) -> None:
        if self._fence:
            await asyncio.to_thread(self._fence.check)

    def _reaches_actors(self) -> bool:
        return (
            not self._connecting and cluster.joined() and not cluster.lost(self.config.placement.ray_address)
        )


def check_network(config: RunConfig, addresses: Iterable[str], served: bool = False) -> None:
    """Raise ConfigError if actors on these nodes could not be reached (`served`: they are engines) or given weights."""
    outside = is_clients(config.placement.ray_address)
    here = None if outside else cluster.node_address()
    elsewhere = sorted({address for address in addresses if address != here})
    if not elsewhere:
        return
    here = "outside the Ray cluster" if outside else f"on node {here}"
    where = f"this process is {here}, and parts of the run are on {', '.join(elsewhere)}"
    if served and config.engines.host in LOOPBACK:
        raise ConfigError(
            f"engines.host = {config.engines.host}: {where}, where loopback cannot be reached; set it to 0.0.0.0, in a "
            "network that nobody else is in: keys, prompts and weights cross it unencrypted"
        )
    if config.sync.directory is None:
        raise ConfigError(
            f"sync.directory: {where}, which do not see this host's folders, where weights go by disk and in a replay; name a folder "
            "that every node sees under the same path, or a URL such as s3://bucket/weights"
        )
