"""A client of one engine that speaks SGLang's native protocol. Does not know which engine it talks to.

Owns requests, answers and their errors; decides nothing about where a request goes or what is tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import orjson

from millrace.connectors.sglang.bucket_payload import Entry
from millrace.core.errors import EngineError, EngineLostError, EngineStalledError

CONTROL_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
INFO_TIMEOUT_S = 30.0
SESSION = "x-smg-routing-key"  # sglang-router's header for its policy `manual`
LOOKS = 4  # in a progress_timeout_s: a stall is noticed so much of it late
Look = Callable[[float, float], Awaitable[None]]
"""Given when a request was sent and a timeout: raises EngineLostError if nothing was generated for that long since."""
FORGOTTEN = "released"  # the weight version of an engine whose weights are gone


@dataclass(frozen=True)
class Generation:
    """What an engine generated for one prompt."""

    output_ids: list[int]
    logprobs: list[float]
    text: str
    finish: Literal["stop", "length", "abort"]
    weight_versions: list[tuple[int, int]]  # first output token, weight version
    engine_id: str
    cached_tokens: int


@dataclass(frozen=True)
class Handoff:
    """Where an engine that decodes meets the one that prefills, and their number for a request."""

    host: str
    port: int
    room: int

    @property
    def fields(self) -> dict[str, Any]:
        """What both are told."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


class EngineClient:
    """One engine at a base URL."""

    def __init__(self, url: str, engine_id: str) -> None:
        self.url = url
        self.engine_id = engine_id
        self.in_flight = 0
        self._closed = False
        self._session: aiohttp.ClientSession | None = None
        self.answered = 0
        self.part = "null"  # what it does of a request: prefill, decode or null: all. Known once it told its weight version
        self.bootstrap_port = 0  # where engines that decode meet it
        self._paused = False  # by this client: SGLang does not tell
        self._looking = asyncio.Lock()
        self._seen: Any = None  # by the last look that was answered
        self._silent: EngineLostError | None = None  # why the last look was not
        self._looked = 0.0
        self._heard = self._moved = time.monotonic()
        self._held = False  # whether it was paused then

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str,
        session: str | None = None,
        progress_timeout_s: float,
        look: Look | None = None,
        handoff: Handoff | None = None,
    ) -> Generation:
        """Generate once. Cancelling aborts the request at the engine.

        session: what a router may keep together. look: asked instead of this engine's progress.
        handoff: for an engine that only prefills, and the one that goes on from there.
        Raises EngineLostError if the engine is gone or makes no progress, EngineError if it refuses the request.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {name: value for name, value in sampling_params.items() if value is not None},
            "rid": rid,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
            **(handoff.fields if handoff else {}),
        }
        self.in_flight += 1
        try:
            posting = self._post(
                "/generate", body, timeout_s=None, headers={SESSION: session} if session else None
            )
            answer = await _watched(posting, look or self._look, progress_timeout_s)
        finally:
            self.in_flight -= 1
        self.answered += 1
        return self._generation(answer)

    async def _look(self, sent: float, timeout_s: float) -> None:
        """See that the engine generates. One that stays paused is given up too, but is not held to be stalled."""
        moved, paused = await self.last_moved(sent, timeout_s)
        if time.monotonic() - moved >= timeout_s:
            raise self.no_progress(timeout_s, paused)

    async def last_moved(self, since: float, timeout_s: float) -> tuple[float, bool]:
        """When the engine was last found to have made something, `since` at the earliest, and whether it is paused.

        One look serves all requests that ask at about the same time. One that fails may be the engine's being busy (it
        compiles, say): raises EngineLostError only if all of them did for timeout_s.
        """
        async with self._looking:
            if time.monotonic() - self._looked >= timeout_s / LOOKS / 2:
                await self._look_again(timeout_s)
        if self._silent and time.monotonic() - max(since, self._heard) >= timeout_s:
            raise EngineLostError(str(self._silent))
        return max(since, self._moved), self._held

    async def _look_again(self, timeout_s: float) -> None:
        try:
            tokens, self._held = await self.progress(timeout_s)
        except EngineLostError as error:
            self._silent = error
        else:
            self._silent, self._heard = None, time.monotonic()
            now = (self.answered, tokens)
            if now != self._seen:
                self._seen, self._moved = now, self._heard
        self._looked = time.monotonic()

    def no_progress(self, timeout_s: float, paused: bool) -> EngineLostError:
        """What is told of an engine that generates nothing."""
        message = f"{self.engine_id}: no token for {timeout_s:g} s (rollout.progress_timeout_s)"
        return EngineLostError(f"{message}: paused") if paused else EngineStalledError(message)

    def _generation(self, answer: Mapping[str, Any]) -> Generation:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]["type"]
        if finish == "abort" and meta["finish_reason"].get("status_code", 200) != 200:
            raise EngineLostError(f"{self.engine_id}: {meta['finish_reason'].get('message')}")
        spans = meta.get("weight_versions") or [{"start": 0, "version": meta["weight_version"]}]
        pairs = meta.get("output_token_logprobs") or []
        ids = [token for _, token, *_ in pairs]
        return Generation(
            output_ids=ids,
            logprobs=[value for value, *_ in pairs],
            text=answer["text"],
            finish=finish,
            weight_versions=[(span["start"], _version(span["version"])) for span in spans],
            engine_id=self.engine_id,
            cached_tokens=meta.get("cached_tokens", 0),
        )

    async def progress(self, timeout_s: float = INFO_TIMEOUT_S) -> tuple[Any, bool]:
        """Something that changes while the engine generates, and whether it is paused."""
        info = await self.server_info(min(timeout_s, INFO_TIMEOUT_S))
        counters = info.get("counters")
        return counters["tokens"] if counters else info.get("internal_states"), self._is_paused(info)

    def _is_paused(self, info: Mapping[str, Any]) -> bool:
        return bool(info.get("paused", self._paused))

    # control

    async def health(self, timeout_s: float = 5.0, generating: bool = False) -> bool:
        """Whether the server answers; with `generating`, whether it still makes tokens."""
        try:
            await self._get("/health_generate" if generating else "/health", timeout_s)
        except EngineError:
            return False
        return True

    async def server_info(self, timeout_s: float = INFO_TIMEOUT_S) -> dict[str, Any]:
        """Settings, load and counters."""
        info: dict[str, Any] = await self._get("/server_info", timeout_s)
        return info

    async def weight_version(self) -> int | None:
        """The version the engine says it serves; None if it is none of the trainer's, or the engine is paused."""
        settings = await self.server_info()
        self.part = settings.get("disaggregation_mode") or "null"
        self.bootstrap_port = int(settings.get("disaggregation_bootstrap_port") or 0)
        if self._is_paused(settings):
            return None
        info = await self._get("/model_info", INFO_TIMEOUT_S)
        found = _version(info.get("weight_version"))
        return None if found < 0 else found

    async def forget_version(self) -> None:
        """Have the engine serve no version of the trainer's until it is given one; it must be idle."""
        body = {"new_version": FORGOTTEN, "abort_all_requests": False}
        await self._post("/update_weight_version", body)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "retract") -> None:
        """Stop generating; what runs is kept unless aborted."""
        self._paused = True  # also if no answer comes
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on generating."""
        await self._post("/continue_generation", {})
        self._paused = False

    async def abort(self, rid: str | None = None) -> None:
        """End requests whose rid starts with `rid`, or all of them."""
        await self._post("/abort_request", {"rid": rid} if rid else {"abort_all": True})

    async def flush(self) -> None:
        """Forget cached prompts; the engine must be idle."""
        await self._post("/flush_cache", {})

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Load a Hugging Face folder as a weight version."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        answer = await self._post("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise EngineError(
                f"{self.engine_id}: did not take weight version {version}: {answer.get('message')}"
            )

    async def update_weights_from_tensor(self, payloads: Sequence[str], version: int | None) -> None:
        """Load one flattened bucket, a payload (millrace.connectors.sglang.bucket_payload) a GPU of the engine.

        The last bucket brings the version. When this returns, the engine has copied what the payload points at.
        """
        body = {"serialized_named_tensors": list(payloads), "disable_draft_model": True}
        await self._take_bucket("/update_weights_from_tensor", body, version)

    async def init_weights_update_group(
        self, host: str, port: int, rank: int, size: int, name: str, backend: str
    ) -> None:
        """Have the engine's GPUs, `rank` being the first, join a group of `size` that meets at an address."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": size,
            "group_name": name,
            "backend": backend,
        }
        answer = await self._post("/init_weights_update_group", body)
        if not answer.get("success"):
            raise EngineError(
                f"{self.engine_id}: did not join the group of a broadcast: {answer.get('message')}"
            )

    async def update_weights_from_distributed(
        self, entries: Sequence[Entry], group: str, version: int | None
    ) -> None:
        """Load one bucket that rank 0 of a group broadcasts meanwhile; the last brings the version."""
        body = {
            "names": [name for name, *_ in entries],
            "shapes": [shape for _, shape, *_ in entries],
            "dtypes": [dtype for _, _, dtype, *_ in entries],
            "group_name": group,
        }
        await self._take_bucket("/update_weights_from_distributed", body, version)

    async def _take_bucket(self, path: str, body: Mapping[str, Any], version: int | None) -> None:
        named = {} if version is None else {"weight_version": str(version)}
        form = {"load_format": "flattened_bucket", "flush_cache": version is not None}
        answer = await self._post(path, {**body, **form, **named})
        if not answer.get("success"):
            raise EngineError(f"{self.engine_id}: did not take a bucket of weights: {answer.get('message')}")

    async def weight_update(self, what: Literal["begin", "end"]) -> None:
        """Bracket an update from buckets, as servers since 0.5.21 want it; older ones do not know it."""
        try:
            await self._post(f"/{what}_weight_update", {})
        except EngineError as error:
            if "answered 404" not in str(error):
                raise

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Give GPU memory back; the engine must be idle."""
        await self._post("/release_memory_occupation", {"tags": list(tags)} if tags else {})

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take GPU memory again."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)} if tags else {})

    async def weights_checksum(self) -> dict[str, Any]:
        """Checksums of the tensors held."""
        answer: dict[str, Any] = await self._post("/weights_checker", {"action": "checksum"})
        return answer

    async def close(self) -> None:
        """Close connections; requests still in flight are lost."""
        self._closed = True
        if self._session:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def _get(self, path: str, timeout_s: float) -> Any:
        return await self._send("GET", path, None, timeout_s)

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        timeout_s: float | None = CONTROL_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        return await self._send("POST", path, body, timeout_s, headers)

    async def _send(
        self,
        verb: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        if self._closed:
            raise EngineLostError(f"{self.engine_id}: not used any more")
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            asking = self._http.request(verb, self.url + path, json=body, timeout=timeout, headers=headers)
            async with asking as answer:
                if answer.status in (200, 202):
                    return (
                        orjson.loads(await answer.read())
                        if answer.content_type == "application/json"
                        else await answer.text()
                    )
                message = (await answer.text())[:500]
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineLostError(
                f"{self.engine_id}: {path} failed: {type(error).__name__}: {error}"
            ) from error
        if answer.status >= 500:
            raise EngineLostError(f"{self.engine_id}: {path} answered {answer.status}: {message}")
        raise EngineError(f"{self.engine_id}: {path} answered {answer.status}: {message}")


async def _watched(posting: Coroutine[Any, Any, Any], look: Look, progress_timeout_s: float) -> Any:
    """The answer, however long it takes, as long as `look` finds that tokens are generated at all."""
    running = asyncio.ensure_future(posting)
    sent = time.monotonic()
    try:
        while True:
            done, _ = await asyncio.wait({running}, timeout=progress_timeout_s / LOOKS)
            if done:
                return running.result()
            await look(sent, progress_timeout_s)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _version(text: Any) -> int:
    """A weight version as the trainer counts them; -1 for an engine's own name for its weights."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return -1
