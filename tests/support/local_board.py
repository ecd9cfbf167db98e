"""A board in threads of this process, in place of one in an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from millrace.tasks.shards.board import Board, Facts

TOKEN = 3


class LocalBoard:
    """What an Actor that holds a Board does."""

    def __init__(self) -> None:
        self.board = Board({}, 0, 1)
        self.board.serve(facts(TOKEN))
        self._threads = ThreadPoolExecutor(32)  # calls that wait at once

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, method, self.board, *args)


def facts(token: int) -> Facts:
    return Facts({}, {}, "/", token, "id", "")
