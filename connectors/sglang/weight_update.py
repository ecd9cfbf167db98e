"""Loading engines from buckets of weights that a trainer fills one after the other: handed over within a GPU, or broadcast.

Owns which engine GPU gets what, the group of a broadcast, and what becomes of engines when one is lost on the way. Knows
nothing of how buckets are made.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from millrace.connectors.sglang.bucket_payload import Entry, payload
from millrace.connectors.sglang.client import EngineClient
from millrace.connectors.sglang.fleet import Load
from millrace.core.errors import (
    EngineError,
    EngineLostError,
    EngineStalledError,
    TrainerError,
    TrainerMemoryError,
    TrainerStalledError,
)

BUCKET_TIMEOUT_S = 60.0  # longest broadcast of one bucket
LATE_S = 10.0  # how much longer engines have


class Filled(Protocol):
    """One rank's copy of a bucket: whole tensors under Hugging Face names."""

    entries: list[Entry]
    handle: bytes
    last: bool


Stream = Callable[[], AsyncIterator[Sequence[Filled]]]
Sender = Callable[..., Awaitable[Any]]
"""Calls a method of trainer rank 0 by its name."""


def load_by_ipc(stream: Stream, gpus: int, seconds: dict[str, float]) -> Load:
    """Loads what `stream` yields: for each bucket all ranks' copies, rank i on GPU i. An engine has `gpus` GPUs.

    Adds to `seconds` what went into filling buckets (gather) and into engines taking them (transfer).
    """

    async def load(clients: Mapping[int, EngineClient], version: int) -> list[Any]:
        async def hand(copies: Sequence[Filled], left: list[int], known: int | None) -> list[Any]:
            return await asyncio.gather(
                *(
                    clients[index].update_weights_from_tensor(
                        [
                            payload(copy.entries, copy.handle)
                            for copy in copies[index * gpus : (index + 1) * gpus]
                        ],
                        known,
                    )
                    for index in left
                ),
                return_exceptions=True,
            )

        return await _load(clients, version, stream, hand, seconds)

    return load


def load_by_broadcast(stream: Stream, sender: Sender, gpus: int, seconds: dict[str, float]) -> Load:
    """Broadcasts what `stream` yields from trainer rank 0 to all GPUs of all engines, each of which has `gpus`.

    Adds to `seconds` as `load_by_ipc` does, and what it took to form the group (group), which is kept while the engines
    are the same. An engine that is lost amid a broadcast leaves the others waiting for it: those are given up as well.
    """

    async def load(clients: Mapping[int, EngineClient], version: int) -> list[Any]:
        started = time.perf_counter()
        group, refused = await _group(clients, sender, gpus)
        seconds["group"] = seconds.get("group", 0.0) + time.perf_counter() - started
        if refused:
            return [refused.get(index, _spared(client)) for index, client in clients.items()]

        async def hand(copies: Sequence[Filled], left: list[int], known: int | None) -> list[Any]:
            if len(left) < len(clients):
                return [_spared(clients[index]) for index in left]
            entries = copies[0].entries
            sending = asyncio.ensure_future(sender("send_bucket", BUCKET_TIMEOUT_S))
            results = await _within(
                BUCKET_TIMEOUT_S + LATE_S,
                [clients[i].update_weights_from_distributed(entries, group, known) for i in left],
                sending,
            )
            if any(results) or sending.exception():
                await sender("close_engine_group")
                return [result or _spared(clients[i]) for i, result in zip(left, results, strict=True)]
            return results

        return await _load(clients, version, stream, hand, seconds)

    return load


async def _load(
    clients: Mapping[int, EngineClient],
    version: int,
    stream: Stream,
    hand: Callable[[Sequence[Filled], list[int], int | None], Awaitable[list[Any]]],
    seconds: dict[str, float],
) -> list[Any]:
    """Hand every bucket to the engines that have not failed; the last brings the version."""
    failed: dict[int, BaseException] = {}
    await _bracket(clients, "begin", failed)
    mark = time.perf_counter()
    async for copies in stream():
        filled = time.perf_counter()
        seconds["gather"] = seconds.get("gather", 0.0) + filled - mark
        left = [index for index in clients if index not in failed]
        _note(left, await hand(copies, left, version if copies[0].last else None), failed)
        mark = time.perf_counter()
        seconds["transfer"] = seconds.get("transfer", 0.0) + mark - filled
        if len(failed) == len(clients):
            break
    await _bracket(clients, "end", failed)
    return [failed.get(index) for index in clients]


async def _group(
    clients: Mapping[int, EngineClient], sender: Sender, gpus: int
) -> tuple[str, dict[int, BaseException]]:
    """Name of a group of trainer rank 0 and these engines, formed unless it is there; and the engines that failed to join."""
    members = [client.url for client in clients.values()]
    held = await sender("engine_group")
    if held and held[1] == members:
        return held[0], {}
    name = f"millrace-{uuid.uuid4().hex[:12]}"
    host, port, backend = await sender("open_engine_group", name, members, all(map(_loopback, members)))
    size = 1 + gpus * len(clients)
    entering = asyncio.ensure_future(sender("enter_engine_group", size))
    results = await _within(
        BUCKET_TIMEOUT_S,
        [
            client.init_weights_update_group(host, port, 1 + gpus * place, size, name, backend)
            for place, client in enumerate(clients.values())
        ],
        entering,
    )
    failed: dict[int, BaseException] = {}
    _note(list(clients), results, failed)
    if failed or entering.exception():
        await sender("close_engine_group")
        failed = failed or {index: _spared(client) for index, client in clients.items()}
    return name, failed


async def _within(seconds: float, calls: list[Awaitable[None]], main: asyncio.Future[Any]) -> list[Any]:
    """None or an error of each engine's call, made beside `main`, rank 0's.

    What is not done in time, or soon after another failed, has stalled. Raises TrainerStalledError if that is `main`.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    everything = {main, *tasks}
    end = deadline = time.monotonic() + seconds
    while not all(task.done() for task in everything) and time.monotonic() < deadline:
        failed = any(task.done() and task.exception() for task in everything)
        deadline = min(deadline, time.monotonic() + LATE_S) if failed else deadline
        await asyncio.wait(
            [task for task in everything if not task.done()],
            timeout=max(0.0, deadline - time.monotonic()),
            return_when=asyncio.FIRST_COMPLETED,
        )
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wait([main], timeout=max(0.0, end - time.monotonic()) + LATE_S)
    if not main.done():
        main.cancel()
        reasons = "; ".join(str(result) for result in results if isinstance(result, EngineError))
        raise TrainerStalledError(
            f"trainer rank 0 does not come back from a broadcast of weights; {reasons or 'the engines say nothing'}"
        )
    error = main.exception()
    if error and (not isinstance(error, TrainerError) or isinstance(error, TrainerMemoryError)):
        raise error
    stalled = EngineStalledError("an engine did not come to the end of a broadcast of weights")
    return [stalled if isinstance(result, asyncio.CancelledError) else result for result in results]


def _spared(client: EngineClient) -> EngineLostError:
    return EngineLostError(f"{client.engine_id}: the broadcast of weights to it and others was given up")


def _loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _bracket(
    clients: Mapping[int, EngineClient], what: Literal["begin", "end"], failed: dict[int, BaseException]
) -> None:
    left = [index for index in clients if index not in failed]
    results = await asyncio.gather(*(clients[i].weight_update(what) for i in left), return_exceptions=True)
    _note(left, results, failed)


def _note(indices: list[int], results: list[Any], failed: dict[int, BaseException]) -> None:
    failed.update({i: r for i, r in zip(indices, results, strict=True) if isinstance(r, BaseException)})
