"""An engine that spans several nodes, as one EngineHandle: a process on each, all started, watched and ended together.

Owns that the end of one process is the end of the engine. Knows nothing of where the processes are, nor of SGLang's options.
"""

import asyncio
import logging
from collections.abc import Sequence

from millrace.connectors.engines.process import PORT_TRIES
from millrace.core.contracts.handles import EngineNodeHandle, FirstNodeHandle, ServerState
from millrace.core.errors import ActorLostError, MillraceError, PortTakenError

log = logging.getLogger(__name__)
READY_S = 0.5  # seconds between two looks at processes that start


class SpanningEngine:
    """The engine. Its first node's process answers requests and has its URL."""

    def __init__(self, index: int, first: FirstNodeHandle, further: Sequence[EngineNodeHandle]) -> None:
        self.index = index
        self._first = first
        self._further = list(further)
        self._changing = asyncio.Lock()  # processes start, or are looked at

    @property
    def _nodes(self) -> list[EngineNodeHandle]:
        return [self._first, *self._further]

    async def state(self) -> ServerState:
        """The first process's state; alive if all live. Raises ActorLostError if the holder of one is gone.

        If a holder was made again, the engine counts as never started: its death was counted when the holder was lost.
        """
        states = await asyncio.gather(*(node.state() for node in self._nodes))
        alive = all(state["alive"] for state in states)
        first = states[0]
        return {
            **first,
            "alive": alive,
            "url": first["url"] if alive else None,
            "key": first["key"] if alive else None,
            "pid": first["pid"] if alive else None,
            "starts": min(state["starts"] for state in states),
        }

    async def start(self, model: str) -> ServerState:
        """Start a process on each node unless all live; returns `state` once the engine answers.

        Raises the first error of a process, after it has ended the others. A start that fails for a taken port is repeated.
        """
        async with self._changing:
            state = await self.state()
            if state["alive"]:
                return state
            for left in reversed(range(PORT_TRIES)):
                try:
                    await self._start_all(model)
                    break
                except PortTakenError:
                    if not left:
                        raise
            return await self.state()

    async def _start_all(self, model: str) -> None:
        try:
            meeting = await self._first.meeting()
            # the first one last: as long as it does not live, one of the others says that the engine is incomplete
            for node in reversed(self._nodes):
                await node.launch(model, meeting)
            while True:
                ready = [await node.ready() for node in self._nodes]
                if all(ready):
                    return
                await asyncio.sleep(READY_S)
        except MillraceError:
            await self._kill_all()
            raise

    async def end_if_incomplete(self) -> None:
        """Kill the engine's other processes if one has ended or its holder is gone: they would wait for it."""
        async with self._changing:
            states = await asyncio.gather(*map(_state_if_held, self._nodes))
            living = [state is not None and state["alive"] for state in states]
            if any(living) and not all(living):
                rank = living.index(False)
                log.warning(
                    "engine-%d: its process on node %d of %d %s; ending the others",
                    self.index,
                    rank + 1,
                    len(living),
                    "is lost with its node" if states[rank] is None else "has ended",
                )
                await self._kill_all()

    async def kill(self) -> None:
        """End all processes at once. Raises ActorLostError if a holder is gone, after it has ended the others."""
        for error in await self._kill_all():
            raise error

    async def _kill_all(self) -> list[BaseException]:
        results = await asyncio.gather(*(node.kill() for node in self._nodes), return_exceptions=True)
        return [result for result in results if isinstance(result, BaseException)]

    async def note_released(self, tags: list[str]) -> None:
        """Remember which GPU memory the engine has released: the first process has that of all released."""
        await self._first.note_released(tags)

    async def download(self, url: str) -> str:
        """Not called: core.config.engines_rules refuses weights by URL for an engine over several nodes."""
        raise AssertionError(url)

    async def remove_download(self) -> None:
        """Nothing was downloaded."""

    async def trace_folder(self) -> str:
        """A folder on the first node: the traces of its GPUs are stored."""
        return await self._first.trace_folder()

    async def store_trace(self, url: str) -> list[str]:
        """Move the first node's files to a folder in storage."""
        return await self._first.store_trace(url)


async def _state_if_held(node: EngineNodeHandle) -> ServerState | None:
    try:
        return await node.state()
    except ActorLostError:
        return None
