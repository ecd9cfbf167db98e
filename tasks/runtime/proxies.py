"""Proxies of the Ray actors that hold servers, with the real methods of the handles in millrace.core.contracts.handles.

Each method here names the method of the held class that runs in the actor: go to its definition to see what happens there.
"""

from typing import Any, cast

from millrace.connectors.engines.process import EngineNode, EngineServer, RouterServer
from millrace.connectors.ray.actors import Actor
from millrace.core.contracts.handles import ServerState


class EngineProxy:
    """An EngineHandle on an actor that holds an EngineServer; of an engine over several nodes, the FirstNodeHandle."""

    def __init__(self, actor: Actor[EngineServer]) -> None:
        self._actor = actor

    async def state(self) -> ServerState:
        """Whether the server lives, and its URL."""
        return server_state(await self._actor.state())

    async def start(self, model: str) -> ServerState:
        """Start the server on a model folder unless it lives."""
        return await self._actor.call(EngineServer.start, model)

    async def meeting(self) -> str:
        """host:port where the processes of all nodes can meet."""
        return await self._actor.call(EngineServer.meeting)

    async def launch(self, model: str, meeting: str) -> None:
        """Start the process, without a wait."""
        await self._actor.call(EngineServer.launch, model, meeting)

    async def ready(self) -> bool:
        """Whether the engine that was launched answers."""
        return await self._actor.call(EngineServer.ready)

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

    async def trace_folder(self) -> str:
        """An empty folder on the engine's node."""
        return await self._actor.call(EngineServer.trace_folder)

    async def store_trace(self, url: str) -> list[str]:
        """Move the folder's files to a folder in storage."""
        return await self._actor.call(EngineServer.store_trace, url)


class EngineNodeProxy:
    """An EngineNodeHandle on an actor that holds an EngineNode."""

    def __init__(self, actor: Actor[EngineNode]) -> None:
        self._actor = actor

    async def state(self) -> ServerState:
        """Whether the process lives."""
        return server_state(await self._actor.state())

    async def launch(self, model: str, meeting: str) -> None:
        """Start the process, without a wait."""
        await self._actor.call(EngineNode.launch, model, meeting)

    async def ready(self) -> bool:
        """True as long as the process that was launched lives."""
        return await self._actor.call(EngineNode.ready)

    async def kill(self) -> None:
        """End the process at once."""
        await self._actor.call(EngineNode.kill)


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


def server_state(state: dict[str, Any]) -> ServerState:
    """The part of an actor's state that the server's holder reports."""
    known = {name: state[name] for name in ServerState.__annotations__ if name in state}
    return cast(ServerState, known)
