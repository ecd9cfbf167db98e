"""A client of one engine that speaks SGLang's native protocol, SGLang or the embedded engine.

Owns requests, answers and their errors; does not choose engines and does not retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from millrace.connectors.engines.request_ids import without_sender
from millrace.connectors.engines.sglang.connection import Connection
from millrace.connectors.engines.sglang.engine_weights import EngineWeights
from millrace.connectors.engines.sglang.wire.answer_body import OutputTokens, read_answer
from millrace.connectors.engines.sglang.wire.stream import StreamedAnswer
from millrace.core.config.pipeline import OnUpdate
from millrace.core.contracts.handles import CONTINUED
from millrace.core.errors import EngineError, EngineLostError, EngineStalledError
from millrace.core.waits.heartbeat import beat

INFO_TIMEOUT_S = 30.0
SESSION = "x-smg-routing-key"  # sglang-router's header for its policy `manual`
IDLE_TRIES, IDLE_WAIT_S = 200, 0.05
POLLS = 4  # per progress_timeout_s, so a stall is noticed at most a quarter of it late
ProgressCheck = Callable[[float, float], Awaitable[None]]
"""Gets the time when a request was sent and a timeout. Raises EngineLostError if no token was generated for that long."""
OnPart = Callable[["Generation"], bool]
"""Gets a request's answer so far, with each token's version. Returns whether to continue."""
KEEPS_REQUESTS = (
    0,
    5,
    23,
)  # the first SGLang that can flush its cache while requests wait, and reports spans of versions
ENDED_AS_ASKED = (None, 200)  # status of a request aborted on purpose; SGLang gives failures another
FORGOTTEN = "released"  # the weight version of an engine without weights
# Starts at random, since engines and their caches outlive a driver: two processes must not use the same numbers.
_refits = itertools.count(secrets.randbits(48))


@dataclass(frozen=True, eq=False)
class Generation:
    """An engine's answer to one prompt: N tokens."""

    output_ids: npt.NDArray[np.int32]  # [N]
    logprobs: npt.NDArray[np.float64]  # [N]
    text: str
    finish: Literal["stop", "length", "abort"]
    weight_versions: list[tuple[int, int]]  # first output token, weight version
    engine_id: str
    cached_tokens: int
    pieces: int = 1  # requests that made it; with several, `text` may differ from the text of all tokens
    cuts: tuple[int, ...] = ()  # the first token of each request but the first


@dataclass(frozen=True)
class Handoff:
    """The address at which the decoding engine meets the prefilling one, and their number for a request."""

    host: str
    port: int
    room: int

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that both engines get."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


class EngineClient(Connection):
    """One engine at a base URL: its requests and its state. `weights` has the endpoints for weights and memory."""

    def __init__(self, url: str, engine_id: str, key: str | None = None) -> None:
        super().__init__(url, engine_id, key)
        self.weights = EngineWeights(self)
        self.in_flight = 0
        self.answered = 0
        self.refit = next(_refits)  # grows with each weight update, and is never reused
        self.refits_amid_requests = 0  # updates during which it kept its requests
        self.part = "null"  # prefill, decode, or null for both; known after the first weight_version()
        self.bootstrap_port = 0  # at which decoding engines meet it
        self._paused = False  # by this client, since SGLang's /server_info does not tell
        self._polling = asyncio.Lock()
        self._last_progress: Any = None  # in the last answered poll
        self._poll_error: EngineLostError | None = None  # why the last poll got no answer
        self._polled_at = 0.0
        self._answered_at = self._moved_at = time.monotonic()
        self._was_paused = False  # in the last answered poll

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str,
        session: str | None = None,
        progress_timeout_s: float,
        check: ProgressCheck | None = None,
        handoff: Handoff | None = None,
        continued: int = 0,
        priority: int | None = None,
        cache_key: str | None = None,
        on_part: OnPart | None = None,
        every: int = 1,
    ) -> Generation:
        """Generate once. Cancelling aborts the request at the engine.

        on_part: called after every `every` tokens. If the weights change during the request and the engine reports only at the end
        which version made which token, the request is ended early to get the report.
        continued: the number of last input ids that are earlier output of the same answer. SGLang does not need it, since its
        random numbers depend on the position in the whole.
        priority: waiting requests with the smallest number come first. cache_key: shares prefixes only with requests of the same
        key. session: requests that a router may keep on one engine. check: replaces the check of this engine's progress.
        handoff: for an engine that only prefills and the engine that decodes.
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
            **({} if priority is None else {"priority": priority}),
            **({"extra_key": cache_key} if cache_key else {}),
        }
        before = self.refits_amid_requests
        self.in_flight += 1
        try:
            headers = {
                **({SESSION: session} if session else {}),
                **({CONTINUED: str(continued)} if continued else {}),
            }
            posting = (
                self.post("/generate", body, timeout_s=None, headers=headers, parse=read_answer)
                if on_part is None
                else self._streamed(body, headers, rid, on_part, every)
            )
            answer = await _watched(posting, check or self._check_progress, progress_timeout_s)
        finally:
            self.in_flight -= 1
        self.answered += 1
        beat()
        if self.refits_amid_requests != before and not answer["meta_info"].get("weight_versions"):
            raise EngineError(
                f"{self.engine_id}: its weights changed amid the request, and it does not say which made which token",
                where=f"request {without_sender(rid)}",
                remedy="set pipeline.on_update=resend",
            )
        return self._generation(answer, rid)

    def note_refit(self) -> None:
        """Record that the engine is about to get new weights."""
        self.refit = next(_refits)

    async def _streamed(
        self,
        body: dict[str, Any],
        headers: Mapping[str, str] | None,
        rid: str,
        on_part: OnPart,
        every: int,
    ) -> Any:
        """Post the request as a stream, report the parts of the answer as they arrive, and return the whole answer."""
        before, ending, whole = self.refits_amid_requests, False, StreamedAnswer()
        params = {**body["sampling_params"], "stream_interval": every}
        streamed = {**body, "sampling_params": params, "stream": True}
        answer: Any = None
        async with contextlib.aclosing(self.events("/generate", streamed, headers, whole.add)) as events:
            async for answer in events:
                meta = answer["meta_info"]
                if meta["finish_reason"] or ending:
                    continue
                known = self.refits_amid_requests == before or meta.get("weight_versions")
                if not (known and on_part(self._generation(answer, rid))):
                    ending = True
                    await self.abort(rid)
        if answer is None or not answer["meta_info"]["finish_reason"]:
            raise EngineLostError(
                f"{self.engine_id}: its answer was cut off", where=f"request {without_sender(rid)}"
            )
        return answer

    async def _check_progress(self, sent: float, timeout_s: float) -> None:
        """Raise an error if the engine makes no progress. An engine that stays paused is given up too, but not as stalled."""
        moved, paused = await self.last_moved(sent, timeout_s)
        if time.monotonic() - moved >= timeout_s:
            raise self.no_progress(timeout_s, paused)

    async def last_moved(self, since: float, timeout_s: float) -> tuple[float, bool]:
        """The time when the engine was last seen to progress, at least `since`, and whether it is paused.

        One poll serves all requests that ask at about the same time. A poll may fail because the engine is busy, for example with
        compiling, so this raises EngineLostError only if all polls have failed for timeout_s.
        """
        async with self._polling:
            if time.monotonic() - self._polled_at >= timeout_s / POLLS / 2:
                await self._poll(timeout_s)
        if self._poll_error and time.monotonic() - max(since, self._answered_at) >= timeout_s:
            raise EngineLostError(str(self._poll_error))
        return max(since, self._moved_at), self._was_paused

    async def _poll(self, timeout_s: float) -> None:
        try:
            tokens, self._was_paused = await self.progress(timeout_s)
        except EngineLostError as error:
            self._poll_error = error
        else:
            self._poll_error, self._answered_at = None, time.monotonic()
            now = (self.answered, tokens)
            if now != self._last_progress:
                self._last_progress, self._moved_at = now, self._answered_at
                beat()
        self._polled_at = time.monotonic()

    def no_progress(self, timeout_s: float, paused: bool) -> EngineLostError:
        """The error for an engine that makes no progress."""
        message = f"{self.engine_id}: no token for {timeout_s:g} s (rollout.progress_timeout_s)"
        return EngineLostError(f"{message}: paused") if paused else EngineStalledError(message)

    def _generation(self, answer: Mapping[str, Any], rid: str) -> Generation:
        """Parse an answer. Raises EngineError if a log-probability is not finite, since no step may train on it."""
        meta = answer["meta_info"]
        reason = meta["finish_reason"] or {"type": "abort"}  # a part of an answer has no reason
        finish = reason["type"]
        if finish == "abort" and reason.get("status_code") not in ENDED_AS_ASKED:
            raise EngineLostError(f"{self.engine_id}: {reason.get('message')}")
        spans = meta.get("weight_versions") or [{"start": 0, "version": meta["weight_version"]}]
        tokens: OutputTokens = meta["output_token_logprobs"]
        wrong = np.flatnonzero(~np.isfinite(tokens.logprobs))
        if len(wrong):
            raise EngineError(
                f"{self.engine_id}: the log-probability of output token {wrong[0]} is {tokens.logprobs[wrong[0]]}",
                where=f"request {without_sender(rid)}",
                remedy="look at the engine's log; its weights or its arithmetic (engines.sglang, model.dtype) give "
                "no finite logits",
            )
        return Generation(
            output_ids=tokens.ids,
            logprobs=tokens.logprobs,
            text=answer["text"],
            finish=finish,
            weight_versions=that_made(
                [(span["start"], _version(span["version"])) for span in spans], len(tokens.ids)
            ),
            engine_id=self.engine_id,
            cached_tokens=meta.get("cached_tokens", 0),
        )

    async def progress(self, timeout_s: float = INFO_TIMEOUT_S) -> tuple[Any, bool]:
        """A value that changes whenever the engine generates, and whether the engine is paused."""
        info = await self.server_info(min(timeout_s, INFO_TIMEOUT_S))
        counters = info.get("counters")
        return counters["tokens"] if counters else info.get("internal_states"), self._is_paused(info)

    def _is_paused(self, info: Mapping[str, Any]) -> bool:
        return bool(info.get("paused", self._paused))

    # control

    async def health(self, timeout_s: float = 5.0, generating: bool = False) -> bool:
        """Whether the server answers; with `generating`, whether it still generates tokens."""
        try:
            await self.get("/health_generate" if generating else "/health", timeout_s)
        except EngineError:
            return False
        return True

    async def server_info(self, timeout_s: float = INFO_TIMEOUT_S) -> dict[str, Any]:
        """Settings, load and counters."""
        info: dict[str, Any] = await self.get("/server_info", timeout_s)
        return info

    async def weight_version(self) -> int | None:
        """The weight version that the engine reports; None if the version is not the trainer's, or the engine is paused."""
        settings = await self.server_info()
        self.part = settings.get("disaggregation_mode") or "null"
        self.bootstrap_port = int(settings.get("disaggregation_bootstrap_port") or 0)
        if self._is_paused(settings):
            return None
        info = await self.get("/model_info", INFO_TIMEOUT_S)
        found = _version(info.get("weight_version"))
        return None if found < 0 else found

    async def check_keeps_requests(self) -> None:
        """Raise EngineError if the server cannot keep requests during a weight update and report each token's version."""
        info = await self.server_info()
        found = str(info.get("version", ""))
        if "counters" not in info and not keeps_requests(found):
            raise EngineError(
                f"{self.engine_id} is SGLang {found or 'of an unknown version'}, which cannot keep requests while weights change",
                where="pipeline.on_update",
                remedy="set it to resend, or install SGLang 0.5.23 or newer",
            )

    async def forget_version(self) -> None:
        """Let the engine report no version of the trainer's until its next update; it must be idle."""
        body = {"new_version": FORGOTTEN, "abort_all_requests": False}
        await self.post("/update_weight_version", body)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "retract") -> None:
        """Stop generating. Running requests are kept, unless the mode is abort."""
        self._paused = True  # also if the answer gets lost
        await self.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue to generate."""
        await self.post("/continue_generation", {})
        self._paused = False

    async def abort(self, rid: str | None = None) -> None:
        """End requests whose rid starts with `rid`, or all of them."""
        await self.post("/abort_request", {"rid": rid} if rid else {"abort_all": True})

    async def flush(self) -> None:
        """Forget cached prompts; the engine must be idle."""
        await self.post("/flush_cache", {})


def that_made(spans: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The spans (first token, weight version) with at least one of the `count` tokens; without tokens, only the last span.

    Versions that came and went while the request waited made no token.
    """
    ends = [first for first, _ in spans[1:]] + [count]
    found = [span for span, end in zip(spans, ends, strict=True) if end > span[0]]
    return found or list(spans[-1:])


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


async def _watched(posting: Coroutine[Any, Any, Any], check: ProgressCheck, progress_timeout_s: float) -> Any:
    """Await the answer without a time limit, as long as `check` finds that the engine generates tokens."""
    running = asyncio.ensure_future(posting)
    sent = time.monotonic()
    try:
        while True:
            done, _ = await asyncio.wait({running}, timeout=progress_timeout_s / POLLS)
            if done:
                return running.result()
            await check(sent, progress_timeout_s)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _version(text: Any) -> int:
    """A weight version as the trainer's number; -1 for any other name."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return -1


def keeps_requests(version: str) -> bool:
    """Whether an SGLang of this version can keep requests during a weight update and report each token's version."""
    return _release(version) >= KEEPS_REQUESTS


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
