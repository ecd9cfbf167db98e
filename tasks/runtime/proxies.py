"""Proxies of the run's Ray actors, with the real methods of the handles in millrace.core.contracts.handles.

Each method here names the method of the held class that runs in the actor: go to its definition to see what happens there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from millrace.connectors.engines.process import EngineServer, RouterServer
from millrace.connectors.ray.actors import Actor, ActorGroup
from millrace.connectors.trainers.megatron.rank import TrainerRank
from millrace.core.contracts.handles import BroadcastGroup, HeldOutSample, SaveState, ServerState
from millrace.core.contracts.step_request import StepRequest
from millrace.core.contracts.task_records import FileRecord, StepMetrics
from millrace.core.contracts.weight_bucket import WeightBucket
from millrace.core.errors import ActorLostError
from millrace.core.families.served_files import ALONE, Served

log = logging.getLogger(__name__)
# after one rank has failed in a step, the others fail too or wait for it in a collective
FAILED_ALONE_S = 60.0


class EngineProxy:
    """An EngineHandle on an actor that holds an EngineServer."""

    def __init__(self, actor: Actor[EngineServer]) -> None:
        self._actor = actor

    async def state(self) -> ServerState:
        """Whether the server lives, and its URL."""
        return server_state(await self._actor.state())

    async def start(self, model: str) -> ServerState:
        """Start the server on a model folder unless it lives."""
        return await self._actor.call(EngineServer.start, model)

    async def kill(self) -> None:
        """End the server at once."""
        await self._actor.call(EngineServer.kill)

    async def note_released(self, tags: list[str]) -> None:
        """Remember which GPU memory the engine has given back."""
        await self._actor.call(EngineServer.note_released, tags)

    async def download(self, url: str) -> str:
        """Copy a folder from storage to the engine's node."""
        return await self._actor.call(EngineServer.download, url)

    async def remove_download(self) -> None:
        """Remove what was downloaded."""
        await self._actor.call(EngineServer.remove_download)


class RouterProxy:
    """A RouterHandle on an actor that holds a RouterServer."""

    def __init__(self, actor: Actor[RouterServer]) -> None:
        self._actor = actor

    async def state(self) -> ServerState:
        """Whether the server lives, and its URL."""
        return server_state(await self._actor.state())

    async def start(self) -> ServerState:
        """Start the router without engines, unless it lives."""
        return await self._actor.call(RouterServer.start)

    async def kill(self) -> None:
        """End the server at once."""
        await self._actor.call(RouterServer.kill)


class BroadcastProxy:
    """A BroadcastSource on the actor of trainer rank 0."""

    def __init__(self, actor: Actor[TrainerRank]) -> None:
        self._actor = actor

    async def group(self) -> BroadcastGroup | None:
        """The group that is open, if any."""
        return await self._actor.call(TrainerRank.broadcast_group)

    async def open(self, name: str, members: list[str], loopback: bool) -> BroadcastGroup:
        """Open a group that engines can join."""
        return await self._actor.call(TrainerRank.open_broadcast, name, members, loopback)

    async def enter(self, size: int) -> None:
        """Join the group while the engines' ranks do."""
        await self._actor.call(TrainerRank.enter_broadcast, size)

    async def send(self, timeout_s: float) -> None:
        """Broadcast the bucket that rank 0 holds."""
        await self._actor.call(TrainerRank.broadcast_bucket, timeout_s)

    async def close(self) -> None:
        """Leave the group."""
        await self._actor.call(TrainerRank.close_broadcast)


class SavesProxy:
    """BackgroundSaves of the actors of all trainer ranks."""

    def __init__(self, ranks: ActorGroup[TrainerRank]) -> None:
        self._ranks = ranks

    async def begin(self, url: str) -> None:
        """Copy a checkpoint to host memory and start writing it under a URL."""
        await self._ranks.call(TrainerRank.begin_save, url)

    async def state(self) -> SaveState | None:
        """State of the newest checkpoint, by the slowest rank."""
        states: list[SaveState | None] = [state["saving"] for state in await self._ranks.states()]
        known = [state for state in states if state is not None]
        if len(known) < len(states) or len({state["url"] for state in known}) > 1:
            return None
        return min(known, key=lambda state: ("failed", "writing", "written").index(state["state"]))

    async def commit(self) -> float:
        """Write complete.json when all parts are written; returns the seconds of the slowest rank."""
        return max(await self._ranks.call(TrainerRank.commit_save))

    async def drop(self) -> None:
        """Drop the uncommitted checkpoint."""
        await self._ranks.call(TrainerRank.drop_save)


class TrainerProxy:
    """A TrainerHandle on the actors of all trainer ranks."""

    def __init__(self, ranks: ActorGroup[TrainerRank]) -> None:
        self._ranks = ranks
        self.broadcast = BroadcastProxy(ranks.actors[0])
        self.saves = SavesProxy(ranks)

    async def versions(self) -> set[int | None]:
        """Weight versions that the ranks hold; {None} if a rank is gone."""
        try:
            return {state["version"] for state in await self._ranks.states()}
        except ActorLostError as error:
            log.warning("%s", error)
            return {None}

    async def prepare(self) -> None:
        """Load the libraries; takes no GPU memory."""
        await self._ranks.call(TrainerRank.prepare)

    async def setup(self) -> None:
        """Meet at rank 0's address, build the model and hold version 0."""
        address = await self._ranks.actors[0].call(TrainerRank.address)
        await self._ranks.call(TrainerRank.setup, address)

    async def load(self, url: str) -> int:
        """Load a checkpoint; returns the version it holds."""
        return (await self._ranks.call(TrainerRank.load, url))[0]

    async def train(self, step: StepRequest) -> StepMetrics:
        """Make a step; returns rank 0's metrics. A step that all ranks refuse can be tried again."""
        figures = await self._ranks.call_together(FAILED_ALONE_S, TrainerRank.train, step)
        return cast(StepMetrics, figures[0])

    async def pass_chunk(self, version: int, number: int, url: str, sha256: str) -> int:
        """Make the passes of a chunk of the step to `version`; returns the number of chunks that all ranks then hold."""
        held = await self._ranks.call_together(
            FAILED_ALONE_S, TrainerRank.pass_chunk, version, number, url, sha256
        )
        return held[0]

    async def losses(self, version: int, samples: Sequence[HeldOutSample]) -> list[float]:
        """Loss of each sample under the weight version that the ranks hold."""
        return (await self._ranks.call_together(FAILED_ALONE_S, TrainerRank.losses, version, list(samples)))[
            0
        ]

    async def save(self, url: str) -> None:
        """Save a checkpoint under a URL."""
        await self._ranks.call(TrainerRank.save, url)

    async def export(self, directory: str, version: int) -> None:
        """Write the weights as a Hugging Face folder that all ranks see."""
        await self._ranks.call(TrainerRank.export, directory, version)

    async def upload(self, url: str, version: int, served: Served = ALONE) -> list[FileRecord]:
        """Write the weights as a Hugging Face folder in any storage; returns its files, relative to it. served: see Served."""
        written = await self._ranks.call(TrainerRank.upload, url, version, served)
        return [file for rank in written for file in rank["files"]]

    async def bucket(self, version: int, number: int, size: int, share: bool) -> Sequence[WeightBucket]:
        """Each rank's copy of bucket `number` of the weights."""
        return await self._ranks.call(TrainerRank.bucket, version, number, size, share)

    async def end_buckets(self) -> None:
        """Free the last bucket."""
        await self._ranks.call(TrainerRank.end_buckets)

    async def offload(self) -> int:
        """Free GPU memory for engines: all but the weights goes to the host. Returns the bytes that rank 0 freed."""
        return (await self._ranks.call(TrainerRank.offload))[0]

    async def reload(self) -> None:
        """Take GPU memory back from engines, ahead of a call that needs it."""
        await self._ranks.call(TrainerRank.reload)


def server_state(state: dict[str, Any]) -> ServerState:
    """The part of an actor's state that the server's holder reports."""
    known = {name: state[name] for name in ServerState.__annotations__ if name in state}
    return cast(ServerState, known)
