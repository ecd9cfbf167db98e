"""The client of an engine that speaks SGLang's native protocol: SGLang itself and the embedded engine.

Owns requests, answers and their errors; does not choose engines and does not retry.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from millrace.connectors.engines.client import GenerateRequest, Generation, OutputTokens
from millrace.connectors.engines.dispatcher import without_sender
from millrace.connectors.engines.sglang.connection import Connection
from millrace.connectors.engines.sglang.engine_weights import SglangWeights
from millrace.connectors.engines.sglang.wire.answer_body import StreamedAnswer, read_answer
from millrace.connectors.engines.watched import WatchedEngine
from millrace.core.admission import EngineLoad
from millrace.core.contracts.handles import CONTINUED
from millrace.core.errors import EngineError, EngineLostError
from millrace.core.families.routed_experts import RoutedRows

INFO_TIMEOUT_S = 30.0
SESSION = "x-smg-routing-key"  # sglang-router's header for its policy `manual`
# The first SGLang that can flush its cache while requests wait, and reports spans of versions
KEEPS_REQUESTS = (0, 5, 23)
ENDED_AS_ASKED = (None, 200)  # status of a request aborted on purpose; SGLang gives failures another
FORGOTTEN = "released"  # the weight version of an engine without weights


class SglangClient(WatchedEngine, Connection):
    """One engine at a base URL, as a millrace.connectors.engines.client.EngineClient."""

    def __init__(self, url: str, engine_id: str, key: str | None = None) -> None:
        WatchedEngine.__init__(self, engine_id)
        Connection.__init__(self, url, engine_id, key)
        self.weights = SglangWeights(self)
        self._paused = False  # by this client, since SGLang's /server_info does not tell

    async def _ask(self, request: GenerateRequest) -> Generation:
        if self.weights.adapters is None:
            return await self._asked(request)
        with self.weights.adapters.naming(request.versions) as (version, name):
            return await self._asked(request, name, version)

    async def _asked(
        self, request: GenerateRequest, adapter: str | None = None, version: int | None = None
    ) -> Generation:
        """Post the request. adapter: whose name answers it; version: of its weights."""
        params = {name: value for name, value in request.sampling_params.items() if value is not None}
        handoff = request.handoff
        body = {
            "input_ids": list(request.input_ids),
            **_pictures(request),
            "sampling_params": params,
            "rid": request.rid,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
            **({f"bootstrap_{name}": value for name, value in asdict(handoff).items()} if handoff else {}),
            **({} if request.priority is None else {"priority": request.priority}),
            **({"extra_key": request.cache_key} if request.cache_key else {}),
            **({"lora_path": adapter} if adapter else {}),
            **_asking(request),
        }
        # SGLang does not read `continued`, since its random numbers depend on the position in the whole
        headers = {
            **({SESSION: request.session} if request.session else {}),
            **({CONTINUED: str(request.continued)} if request.continued else {}),
        }
        before = self.refits_amid_requests
        answer = (
            await self.post("/generate", body, timeout_s=None, headers=headers, parse=read_answer)
            if request.on_part is None
            else await self._streamed(request, body, headers, version)
        )
        self._note_answer()
        if self.refits_amid_requests != before and not answer["meta_info"].get("weight_versions"):
            raise EngineError(
                f"{self.engine_id}: its weights changed amid the request, and it does not say which made which token",
                where=f"request {without_sender(request.rid)}",
                remedy="set pipeline.on_update=resend",
            )
        return self._generation(answer, request, version)

    async def _streamed(
        self,
        request: GenerateRequest,
        body: dict[str, Any],
        headers: Mapping[str, str],
        version: int | None,
    ) -> Any:
        """Post the request as a stream, report the parts of the answer as they arrive, and return the whole answer.

        SGLang before 0.5.23 reports only at the end which version made which token, so a request during which the weights changed is
        ended early to get the report.
        """
        assert request.on_part is not None
        before, ending, whole = self.refits_amid_requests, False, StreamedAnswer()
        params = {**body["sampling_params"], "stream_interval": request.every}
        streamed = {**body, "sampling_params": params, "stream": True}
        answer: Any = None
        async with contextlib.aclosing(self.events("/generate", streamed, headers, whole.add)) as events:
            async for answer in events:
                meta = answer["meta_info"]
                if meta["finish_reason"] or ending:
                    continue
                known = self.refits_amid_requests == before or meta.get("weight_versions")
                if not (known and request.on_part(self._generation(answer, request, version))):
                    ending = True
                    await self.abort(request.rid)
        if answer is None or not answer["meta_info"]["finish_reason"]:
            raise EngineLostError(
                f"{self.engine_id}: its answer was cut off", where=f"request {without_sender(request.rid)}"
            )
        return answer

    def _generation(
        self, answer: Mapping[str, Any], request: GenerateRequest, version: int | None
    ) -> Generation:
        """Parse an answer. version: of all its tokens; None: as the engine says.

        Raises EngineError if a log-probability is not finite, since no step may train on it, or if the experts that were asked for
        are missing or none of the model's.
        """
        meta = answer["meta_info"]
        self._check_prompt(meta, request)
        reason = meta["finish_reason"] or {"type": "abort"}  # a part of an answer has no reason
        finish = reason["type"]
        if finish == "abort" and reason.get("status_code") not in ENDED_AS_ASKED:
            raise EngineLostError(f"{self.engine_id}: {reason.get('message')}")
        spans = meta.get("weight_versions") or [{"start": 0, "version": meta["weight_version"]}]
        if version is not None:
            spans = [{"start": 0, "version": version}]
        tokens: OutputTokens = meta["output_token_logprobs"]
        wrong = np.flatnonzero(~np.isfinite(tokens.logprobs))
        if len(wrong):
            raise EngineError(
                f"{self.engine_id}: the log-probability of output token {wrong[0]} is {tokens.logprobs[wrong[0]]}",
                where=f"request {without_sender(request.rid)}",
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
            routed=self._routed(meta, request, len(tokens.ids)),
            retractions=meta.get("num_retractions", 0),
        )

    def _check_prompt(self, meta: Mapping[str, Any], request: GenerateRequest) -> None:
        """Raise EngineError if an engine took another number of tokens for a prompt with pictures than the trainer would."""
        taken, meant = meta.get("prompt_tokens"), len(request.input_ids)
        if request.images and taken not in (None, meant):
            raise EngineError(
                f"{self.engine_id}: it took {taken} tokens for a prompt with pictures that has {meant}",
                where=f"request {without_sender(request.rid)}",
                remedy="serve the very folder of model.path: preprocessor_config.json decides how many tokens a picture has",
            )

    def _routed(self, meta: Mapping[str, Any], request: GenerateRequest, made: int) -> RoutedRows | None:
        asked = request.experts
        if asked is None or not made:
            return None
        if meta.get("num_retractions") and meta.get("routed_experts") is None:
            return RoutedRows(asked.form.width, b"")  # it ended while it waited to be computed again
        try:
            rows = len(request.input_ids) + made - 1 - asked.first
            return asked.form.from_engine(meta.get("routed_experts"), rows)
        except ValueError as error:
            raise EngineError(
                f"{self.engine_id}: {error}",
                where=f"request {without_sender(request.rid)}",
                remedy="start SGLang with --enable-return-routed-experts; a branch may set rollout.routing_replay=false",
            ) from error

    async def progress(self, timeout_s: float = INFO_TIMEOUT_S) -> tuple[Any, bool]:
        info = await self.server_info(min(timeout_s, INFO_TIMEOUT_S))
        counters = info.get("counters")
        return counters["tokens"] if counters else info.get("internal_states"), self._is_paused(info)

    def _is_paused(self, info: Mapping[str, Any]) -> bool:
        return bool(info.get("paused", self._paused))

    # control

    async def health(self, timeout_s: float = 5.0, generating: bool = False) -> bool:
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
        settings = await self.server_info()
        self.part = settings.get("disaggregation_mode") or "null"
        self.bootstrap_port = int(settings.get("disaggregation_bootstrap_port") or 0)
        if self._is_paused(settings):
            return None
        if self.weights.adapters is not None:
            return await self.weights.adapters.newest()
        info = await self.get("/model_info", INFO_TIMEOUT_S)
        found = _version(info.get("weight_version"))
        return None if found < 0 else found

    async def check_keeps_requests(self) -> None:
        info = await self.server_info()
        found = str(info.get("version", ""))
        if "counters" not in info and not keeps_requests(found):
            raise EngineError(
                f"{self.engine_id} is SGLang {found or 'of an unknown version'}, which cannot keep requests while weights change",
                where="pipeline.on_update",
                remedy="set it to resend, or install SGLang 0.5.23 or newer",
            )

    async def check_holds_adapters(self, slots: int) -> None:
        info = await self.server_info()
        most = info.get("max_loaded_loras")  # None: no limit
        if not info.get("enable_lora") or (most is not None and most < slots):
            holds = f"holds {most or 0} adapters" if info.get("enable_lora") else "takes no adapters"
            raise EngineError(
                f"{self.engine_id} {holds}, and the run has {slots} at once",
                where="sync.lora",
                remedy=f"start the engine with --enable-lora, and if --max-loaded-loras is given with at least {slots}; or set sync.lora "
                "to merged",
            )

    async def load(self) -> EngineLoad:
        answer = await self.get("/v1/loads", INFO_TIMEOUT_S)
        parts = answer["loads"]  # one for each data parallel part
        if not parts or not all(part.get("max_total_num_tokens") for part in parts):
            raise EngineError(
                f"{self.engine_id}: it does not say how large its KV cache is",
                where="rollout.admission",
                remedy="set it to fixed, or install SGLang 0.5.17 or newer",
            )
        return EngineLoad(
            used=max(part["num_used_tokens"] / part["max_total_num_tokens"] for part in parts),
            capacity=sum(part["max_total_num_tokens"] for part in parts),
            running=sum(part["num_running_reqs"] for part in parts),
            waiting=sum(part["num_waiting_reqs"] for part in parts),
            retracted=sum(part.get("queues", {}).get("retracted", 0) for part in parts),
        )

    async def start_trace(self, folder: str, steps: int) -> None:
        activities = ["CPU", "GPU"]
        await self.post(
            "/start_profile", {"output_dir": folder, "num_steps": steps, "activities": activities}
        )

    async def stop_trace(self) -> None:
        # refused if the steps are done: SGLang says so with a status of 500
        with contextlib.suppress(EngineError):
            await self.post("/stop_profile", {})

    async def forget_version(self) -> None:
        if self.weights.adapters is not None:
            self.weights.adapters.forget()
            return
        body = {"new_version": FORGOTTEN, "abort_all_requests": False}
        await self.post("/update_weight_version", body)

    async def pause(self, mode: Literal["retract", "in_place"] = "retract") -> None:
        self._paused = True  # also if the answer gets lost
        await self.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.post("/continue_generation", {})
        self._paused = False

    async def abort(self, rid: str | None = None) -> None:
        await self.post("/abort_request", {"rid": rid} if rid else {"abort_all": True})

    async def flush(self) -> None:
        await self.post("/flush_cache", {})


def _pictures(request: GenerateRequest) -> dict[str, Any]:
    """The fields of a prompt with pictures: one token stands for each, and the engine's processor makes them as many as it has."""
    if request.images is None:
        return {}
    return {
        "input_ids": request.images.compressed(request.input_ids),
        "image_data": [image.data_url for image in request.images.images],
    }


def _asking(request: GenerateRequest) -> dict[str, Any]:
    """The fields that ask for routed experts."""
    if request.experts is None:
        return {}
    assert request.on_part is None, "engines report experts only when a request ends"
    return {"return_routed_experts": True, "routed_experts_start_len": request.experts.first}


def that_made(spans: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The spans (first token, weight version) with at least one of the `count` tokens; without tokens, only the last span.

    Versions that came and went while the request waited made no token.
    """
    ends = [first for first, _ in spans[1:]] + [count]
    found = [span for span, end in zip(spans, ends, strict=True) if end > span[0]]
    return found or list(spans[-1:])


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
