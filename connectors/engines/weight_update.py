"""Ways to load weights into engines: a folder, a folder in storage, buckets on shared GPUs, buckets broadcast by rank 0.

Owns how requests are held meanwhile, which weights each engine GPU gets, the group of a broadcast, and what happens to the other engines when one is lost. Knows
nothing of how buckets are made, nor of which engine may serve.
"""

import asyncio
import ipaddress
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from millrace.connectors.engines.client import EngineClient
from millrace.core.config.pipeline import OnUpdate
from millrace.core.contracts.handles import Asked, BroadcastSource, EngineHandle
from millrace.core.contracts.weight_bucket import WeightBucket
from millrace.core.errors import (
    ActorLostError,
    EngineError,
    EngineLostError,
    EngineStalledError,
    TrainerError,
    TrainerMemoryError,
    TrainerStalledError,
)

BUCKET_TIMEOUT_S = 60.0  # longest broadcast of one bucket
LATE_S = 10.0  # how much longer engines may take
IDLE_TRIES, IDLE_WAIT_S = 200, 0.05

Clients = Mapping[int, EngineClient]  # by engine index
Results = list[Any]  # one per engine, in the order of the clients: an error, or anything else for success
Load = Callable[[Clients, int], Awaitable[Results]]
"""Loads a weight version into engines."""
BucketStream = Callable[[], AsyncIterator[Sequence[WeightBucket]]]
"""One pass over all weights, bucket by bucket; each item has every rank's copy of a bucket."""
_SendBucket = Callable[[Sequence[WeightBucket], list[int], int | None], Awaitable[Results]]


async def pause_for_update(client: EngineClient, on_update: OnUpdate) -> None:
    """Pause an engine before a weight update.

    With retract and keep it keeps its requests; raises EngineError if the engine cannot. Otherwise the requests are ended first,
    since SGLang 0.5.17 dies if weights arrive while requests wait. Their dispatcher sends them again, unless they were cancelled
    or sent by a dead driver.
    """
    if on_update in ("retract", "keep"):
        await client.check_keeps_requests()
        client.refits_amid_requests += 1
        await client.pause("retract" if on_update == "retract" else "in_place")
    else:
        await idle(client)
        await client.pause("retract")


async def idle(client: EngineClient) -> None:
    """End an engine's requests, and flush its cache as soon as none runs: until then the engine refuses."""
    await client.abort()
    for _ in range(IDLE_TRIES):
        try:
            return await client.flush()
        except EngineLostError:
            raise
        except EngineError:
            await asyncio.sleep(IDLE_WAIT_S)
    raise EngineLostError(f"{client.engine_id}: still busy after its requests were ended")


def each(call: Callable[[EngineClient], Awaitable[Any]]) -> Load:
    """Calls every engine at once."""

    async def load(clients: Clients, version: int) -> Results:
        return list(await asyncio.gather(*map(call, clients.values()), return_exceptions=True))

    return load


def load_from_folder(directory: str) -> Load:
    """Loads a Hugging Face folder that every engine can read."""

    async def load(clients: Clients, version: int) -> Results:
        update = each(lambda client: client.weights.update_from_disk(directory, version))
        return await update(clients, version)

    return load


async def load_from_storage(url: str, handles: Mapping[int, EngineHandle], seconds: dict[str, float]) -> Load:
    """Copies a folder in storage to each engine's node, while it still generates; loads the copies, then removes them.

    Adds the copies' time (fetch) to `seconds`. Raises StorageError, before any engine is touched, if the URL cannot be read.
    """
    started = time.perf_counter()
    results = await asyncio.gather(
        *(_download(index, handle, url) for index, handle in handles.items()), return_exceptions=True
    )
    seconds["fetch"] = seconds.get("fetch", 0.0) + time.perf_counter() - started
    copies = dict(zip(handles, results, strict=True))
    for copy in results:
        if isinstance(copy, BaseException) and not isinstance(copy, EngineLostError):
            removals = [_remove_download(index, handle) for index, handle in handles.items()]
            await asyncio.gather(*removals, return_exceptions=True)
            raise copy

    async def load_one(index: int, client: EngineClient, version: int) -> None:
        copy = copies[index]
        if isinstance(copy, BaseException):
            raise copy
        try:
            await client.weights.update_from_disk(copy, version)
        finally:
            await _remove_download(index, handles[index])

    async def load(clients: Clients, version: int) -> Results:
        loads = [load_one(index, client, version) for index, client in clients.items()]
        return await asyncio.gather(*loads, return_exceptions=True)

    return load


async def _download(index: int, handle: EngineHandle, url: str) -> str:
    try:
        return await handle.download(url)
    except ActorLostError as error:
        raise EngineLostError(f"engine-{index}: {error}") from None


async def _remove_download(index: int, handle: EngineHandle) -> None:
    try:
        await handle.remove_download()
    except ActorLostError as error:
        raise EngineLostError(f"engine-{index}: {error}") from None


def load_by_ipc(stream: BucketStream, gpus: int, seconds: dict[str, float]) -> Load:
    """Gives GPU i of each engine rank i's copy of every bucket. An engine has `gpus` GPUs.

    Adds to `seconds` the time to fill buckets (gather) and the time until engines have them (transfer).
    """

    async def load(clients: Clients, version: int) -> Results:
        async def send(copies: Sequence[WeightBucket], left: list[int], known: int | None) -> Results:
            return await asyncio.gather(
                *(
                    clients[index].weights.update_from_memory(
                        copies[index * gpus : (index + 1) * gpus], known
                    )
                    for index in left
                ),
                return_exceptions=True,
            )

        return await _load_buckets(clients, version, stream, send, seconds)

    return load


def load_by_broadcast(
    stream: BucketStream, source: Asked[BroadcastSource], gpus: int, seconds: dict[str, float]
) -> Load:
    """Broadcasts every bucket from trainer rank 0 to all GPUs of all engines, `gpus` each.

    Adds the same times to `seconds` as `load_by_ipc`, and the time to form the group (group), which is kept while the engines stay
    the same. If an engine is lost during a broadcast, the others wait for it, and are given up too.
    """

    async def load(clients: Clients, version: int) -> Results:
        started = time.perf_counter()
        group, refusals = await _joined_group(clients, source, gpus)
        seconds["group"] = seconds.get("group", 0.0) + time.perf_counter() - started
        if refusals:
            return [refusals.get(index, _given_up(client)) for index, client in clients.items()]

        async def send(copies: Sequence[WeightBucket], left: list[int], known: int | None) -> Results:
            if len(left) < len(clients):
                return [_given_up(clients[index]) for index in left]
            entries = copies[0].entries
            sending = asyncio.ensure_future(source.call(BroadcastSource.broadcast_bucket, BUCKET_TIMEOUT_S))
            results = await _within(
                BUCKET_TIMEOUT_S + LATE_S,
                [clients[i].weights.update_from_broadcast(entries, group, known) for i in left],
                sending,
            )
            if any(results) or sending.exception():
                await source.call(BroadcastSource.close_broadcast)
                return [result or _given_up(clients[i]) for i, result in zip(left, results, strict=True)]
            return results

        return await _load_buckets(clients, version, stream, send, seconds)

    return load


async def _load_buckets(
    clients: Clients, version: int, stream: BucketStream, send: _SendBucket, seconds: dict[str, float]
) -> Results:
    """Send every bucket to all engines that have not failed. The last bucket carries the version."""
    failed: dict[int, BaseException] = {}
    await _bracket(clients, "begin", failed)
    mark = time.perf_counter()
    async for copies in stream():
        filled = time.perf_counter()
        seconds["gather"] = seconds.get("gather", 0.0) + filled - mark
        left = [index for index in clients if index not in failed]
        _collect_errors(left, await send(copies, left, version if copies[0].last else None), failed)
        mark = time.perf_counter()
        seconds["transfer"] = seconds.get("transfer", 0.0) + mark - filled
        if len(failed) == len(clients):
            break
    await _bracket(clients, "end", failed)
    return [failed.get(index) for index in clients]


async def _joined_group(
    clients: Clients, source: Asked[BroadcastSource], gpus: int
) -> tuple[str, dict[int, BaseException]]:
    """Form a group of rank 0 and these engines, unless it exists; returns its name, and the errors of engines that did not join."""
    members = [client.url for client in clients.values()]
    current = await source.call(BroadcastSource.broadcast_group)
    if current and current.members == members:
        return current.name, {}
    name = f"millrace-{uuid.uuid4().hex[:12]}"
    group = await source.call(BroadcastSource.open_broadcast, name, members, all(map(_is_loopback, members)))
    size = 1 + gpus * len(clients)
    entering = asyncio.ensure_future(source.call(BroadcastSource.enter_broadcast, size))
    results = await _within(
        BUCKET_TIMEOUT_S,
        [
            client.weights.join_group(group.host, group.port, 1 + gpus * place, size, name, group.backend)
            for place, client in enumerate(clients.values())
        ],
        entering,
    )
    failed: dict[int, BaseException] = {}
    _collect_errors(list(clients), results, failed)
    if failed or entering.exception():
        await source.call(BroadcastSource.close_broadcast)
        failed = failed or {index: _given_up(client) for index, client in clients.items()}
    return name, failed


async def _within(
    seconds: float, calls: list[Coroutine[Any, Any, None]], main: asyncio.Future[None]
) -> Results:
    """None or an error for each engine's call. The calls run beside `main`, rank 0's call.

    A call that does not end in time, or soon after another one failed, has stalled. Raises TrainerStalledError if `main` stalls.
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
            f"trainer rank 0 does not return from a broadcast of weights; {reasons or 'no engine reports an error'}"
        )
    error = main.exception()
    if error and (not isinstance(error, TrainerError) or isinstance(error, TrainerMemoryError)):
        raise error
    stalled = EngineStalledError("an engine did not finish a broadcast of weights")
    return [stalled if isinstance(result, asyncio.CancelledError) else result for result in results]


def _given_up(client: EngineClient) -> EngineLostError:
    return EngineLostError(f"{client.engine_id}: the broadcast of weights to it and others was given up")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _bracket(clients: Clients, what: Literal["begin", "end"], failed: dict[int, BaseException]) -> None:
    left = [index for index in clients if index not in failed]
    results = await asyncio.gather(
        *(clients[index].weights.bracket_update(what) for index in left), return_exceptions=True
    )
    _collect_errors(left, results, failed)


def _collect_errors(indices: list[int], results: Results, failed: dict[int, BaseException]) -> None:
    failed.update({i: r for i, r in zip(indices, results, strict=True) if isinstance(r, BaseException)})
