"""Loading engines from buckets of GPU memory that a trainer on the same GPUs fills one after the other.

Owns which engine GPU gets which trainer rank's bucket. Knows nothing of how buckets are made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from connectors.sglang.bucket import Entry, payload
from connectors.sglang.client import EngineClient
from connectors.sglang.fleet import Load


class Filled(Protocol):
    """One rank's bucket: whole tensors under Hugging Face names in memory of the rank's GPU."""

    entries: list[Entry]
    handle: bytes
    last: bool


def from_buckets(
    stream: Callable[[], AsyncIterator[Sequence[Filled]]], gpus: int, seconds: dict[str, float]
) -> Load:
    """Loads what `stream` yields: for each bucket all ranks' copies, rank i on GPU i. An engine has `gpus` GPUs.

    Adds to `seconds` what went into filling buckets (gather) and into engines taking them (transfer).
    """

    async def load(clients: Mapping[int, EngineClient], version: int) -> list[Any]:
        failed: dict[int, BaseException] = {}
        await _bracket(clients, "begin", failed)
        mark = time.perf_counter()
        async for copies in stream():
            filled = time.perf_counter()
            seconds["gather"] = seconds.get("gather", 0.0) + filled - mark
            known = version if copies[0].last else None
            await _hand(clients, copies, gpus, known, failed)
            mark = time.perf_counter()
            seconds["transfer"] = seconds.get("transfer", 0.0) + mark - filled
        await _bracket(clients, "end", failed)
        return [failed.get(index) for index in clients]

    return load


async def _hand(
    clients: Mapping[int, EngineClient],
    copies: Sequence[Filled],
    gpus: int,
    version: int | None,
    failed: dict[int, BaseException],
) -> None:
    left = [index for index in clients if index not in failed]
    results = await asyncio.gather(
        *(
            clients[index].update_weights_from_tensor(
                [payload(copy.entries, copy.handle) for copy in copies[index * gpus : (index + 1) * gpus]],
                version,
            )
            for index in left
        ),
        return_exceptions=True,
    )
    _note(left, results, failed)


async def _bracket(clients: Mapping[int, EngineClient], what: Any, failed: dict[int, BaseException]) -> None:
    left = [index for index in clients if index not in failed]
    results = await asyncio.gather(*(clients[i].weight_update(what) for i in left), return_exceptions=True)
    _note(left, results, failed)


def _note(indices: list[int], results: list[Any], failed: dict[int, BaseException]) -> None:
    failed.update({i: r for i, r in zip(indices, results, strict=True) if isinstance(r, BaseException)})
