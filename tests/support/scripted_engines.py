"""Engines that answer without a model: each request gets the same tokens, or the error that a script names for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from millrace.connectors.engines.client import AskedExperts, Generation
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.dispatching.pieces import Flush
from millrace.core.contracts.images import SentImages
from millrace.core.errors import EngineError


def generation(
    ids: Sequence[int], logprobs: Sequence[float], text: str, finish: Literal["stop", "length"] = "stop"
) -> Generation:
    """What an engine at version 3 generated."""
    arrays = np.array(ids, dtype=np.int32), np.array(logprobs)
    return Generation(*arrays, text, finish, [(0, 3)], "engine-0", 0)


FEW = generation([7, 8], [-0.5, -0.25], "2 .")


async def _no_images(prompt: str) -> None:
    """The pictures of a prompt."""


# of prompts in a test that has no pictures
TEXT_ALONE: dict[str, Any] = {
    "sent_images": _no_images,
    "held_out_images": [],
    "unsampled": lambda sources: (),
    "keep_images": lambda read: [],
}


class ScriptedEngines(Dispatcher):
    """Stands where the dispatcher does. `fails(rid)`: whether no engine can generate this request."""

    def __init__(self, fails: Callable[[str], bool] = lambda _: False) -> None:
        self.fails = fails
        self.requests: list[tuple[str, list[int], dict[str, Any], str | None]] = []
        self.priorities: set[int | None] = set()

    async def generate(
        self,
        input_ids: Sequence[int],
        params: Mapping[str, Any],
        *,
        rid: str,
        session: str | None,
        continued: int = 0,
        priority: int | None = None,
        flush: Flush | None = None,
        experts: AskedExperts | None = None,
        images: SentImages | None = None,
    ) -> Generation:
        self.requests.append((rid, list(input_ids), dict(params), session))
        self.priorities.add(priority)
        if self.fails(rid):
            raise EngineError("engine-0: died")
        return FEW
