"""Appends rows as parts of one folder while they come, for samples and for turns.

Owns when a part is written, and that rows are written in their order. Knows nothing of their content.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.parts import write_part
from millrace.core.contracts import schema
from millrace.core.waits import beat, heartbeat, progressing
from millrace.tasks.context import IterationContext

WAIT_S = 0.1  # rows wait this long for others before they are written

Landed = Callable[[FileEntry], Awaitable[None]]


class PartWriter:
    """Takes rows; `open` writes them."""

    def __init__(
        self,
        ctx: IterationContext,
        kind: str,
        limit: int,
        busy: Callable[[], bool],
        landed: Landed,
        wait_s: float = WAIT_S,
    ) -> None:
        """limit: rows of a part. busy: whether more rows may come soon, so that rows wait. landed: called for each whole part."""
        self._ctx, self._kind, self._limit = ctx, kind, limit
        self._busy, self._landed, self._wait_s = busy, landed, wait_s
        self._queue: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        self._put = self._written = 0
        self._moved = asyncio.Condition()

    def put(self, rows: Sequence[Any]) -> Callable[[], bool]:
        """Queue rows to be written in one part; returns a function that tells whether they are written."""
        self._put += 1
        number = self._put
        self._queue.put_nowait(list(rows))
        return lambda: self._written >= number

    async def settled(self, at_once: bool = False) -> None:
        """Wait until all rows put so far are stored. at_once: do not wait for more rows."""
        if at_once:
            self.put([])
        wanted, limit = self._put, self._ctx.config.run_limit
        await progressing(self._until(wanted), f"parts of {self._kind} to be stored", limit, heartbeat)

    async def _until(self, wanted: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._written >= wanted)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[PartWriter]:
        """Write rows in the background; on leaving, all are written.

        A failed write ends the body, which could wait for a part that never lands.
        """
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(self._drain())
            try:
                yield self
            finally:
                self._queue.put_nowait(None)
                what, limit = f"the last parts of {self._kind} to be stored", self._ctx.config.run_limit
                await progressing(asyncio.wait([writing]), what, limit, heartbeat)

    async def _drain(self) -> None:
        open_ = True
        while open_:
            items = [await self._queue.get()]
            deadline = asyncio.get_running_loop().time() + self._wait_s
            while items[-1] and _rows(items) < self._limit and self._more():
                try:
                    async with asyncio.timeout_at(deadline):
                        items.append(await self._queue.get())
                except TimeoutError:
                    break
            open_ = items[-1] is not None
            await self._write([row for item in items for row in item or ()])
            async with self._moved:
                self._written += sum(item is not None for item in items)
                self._moved.notify_all()

    def _more(self) -> bool:
        return self._busy() or not self._queue.empty()

    async def _write(self, rows: list[Any]) -> None:
        if not rows:
            return
        ctx, kind = self._ctx, self._kind
        entry = await asyncio.to_thread(
            lambda: write_part(ctx.folder, kind, schema.to_table(rows, kind), kind)
        )
        ctx.parts[kind].append(entry.record())
        beat()
        await self._landed(entry)


def _rows(items: Sequence[list[Any] | None]) -> int:
    return sum(len(item) for item in items if item)
