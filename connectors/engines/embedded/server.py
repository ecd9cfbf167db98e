"""The engine's HTTP server: SGLang's native endpoints and fields. Chat completions are in millrace.connectors.engines.embedded.chat.

Owns parsing and answering; decides nothing about tokens. Bodies are JSON and safetensors; nothing is ever unpickled.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web

from millrace.connectors.engines.embedded.access import Access, middleware
from millrace.connectors.engines.embedded.adapter_routes import AdapterRoutes, named_adapter
from millrace.connectors.engines.embedded.body import read_json
from millrace.connectors.engines.embedded.chat import ChatRoute
from millrace.connectors.engines.embedded.engine import Engine
from millrace.connectors.engines.embedded.model import ModelError
from millrace.connectors.engines.embedded.sampling import DIGITS, LARGEST, RequestError, SamplingParams, whole
from millrace.connectors.engines.embedded.seen_images import SeenImages
from millrace.connectors.engines.embedded.slots import Request
from millrace.connectors.engines.embedded.weight_routes import WeightRoutes
from millrace.core.contracts.handles import CONTINUED

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY_LIMIT = 4 * 2**30
MOST_ANSWERS = 4096  # per request, unless it has more prompts with one answer each
MOST_TOPS = 256  # likeliest tokens per position
News = asyncio.Queue[tuple[int, int, bool]]
"""A request's number, its count of tokens, and whether it has ended."""


class Server:
    """HTTP handlers for one engine."""

    def __init__(self, engine: Engine, info: Mapping[str, Any], access: Access) -> None:
        self.engine = engine
        self._access = access
        self.info = dict(info)

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[middleware(self._access), _errors])
        post, get = app.router.add_post, app.router.add_get
        for path, handler in (("/health", self.health), ("/health_generate", self.health_generate)):
            get(path, handler)
        for path, handler in (("/server_info", self.server_info), ("/get_server_info", self.server_info)):
            get(path, handler)
        for path, handler in (("/model_info", self.model_info), ("/get_model_info", self.model_info)):
            get(path, handler)
        get("/v1/loads", self.loads)
        get("/flush_cache", self.flush_cache)
        post("/generate", self.generate)
        post("/abort_request", self.abort_request)
        post("/pause_generation", self.pause_generation)
        post("/continue_generation", self.continue_generation)
        post("/flush_cache", self.flush_cache)
        post("/start_profile", self.start_profile)
        post("/stop_profile", self.stop_profile)
        post("/release_memory_occupation", self.release_memory)
        post("/resume_memory_occupation", self.resume_memory)
        WeightRoutes(self.engine).add_to(app)
        AdapterRoutes(self.engine, self.info["model_path"]).add_to(app)
        ChatRoute(self.engine, self.info["model_path"], self._text).add_to(app)
        return app

    # generation

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """One prompt or a batch; plain or streamed."""
        body = await read_json(http)
        prompts, single = self._prompts(body)
        prompts, seen = await self._with_pictures(body, prompts, single)
        given = _continued(http)
        params = body.get("sampling_params")
        each = params if isinstance(params, list) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"sampling_params: {len(each)} given for {len(prompts)} prompts")
        parsed = [SamplingParams.parse(p) for p in each]
        count = sum(p.n for p in parsed)
        if count > max(MOST_ANSWERS, len(prompts)):
            raise RequestError(f"sampling_params.n: {count} answers, a request has at most {MOST_ANSWERS}")
        if given and count > len(prompts):
            raise RequestError(f"{CONTINUED}: it continues one answer, and sampling_params.n asks for more")
        rids = self._rids(body, count, single and parsed[0].n == 1)
        queue: News = asyncio.Queue()
        streams, loop = bool(body.get("stream")), asyncio.get_running_loop()
        requests: list[Request] = []
        for prompt, p in zip(prompts, parsed, strict=True):
            self.engine.check(prompt, p)
            if given >= len(prompt):
                raise RequestError(
                    f"{CONTINUED}: how many of the last input_ids are output, fewer than all of them"
                )
            asked, output = prompt[: len(prompt) - given], prompt[len(prompt) - given :]
            for copy in range(p.n):
                at = len(requests)
                seed = self.engine.draw_seed() if p.sampling_seed is None else p.sampling_seed + copy
                notify = _notifier(loop, queue, at, p.stream_interval if streams else 0)
                request = self._request(body, rids[at], asked, list(output), p, seed, notify)
                request.seen = seen
                requests.append(request)
        many = not single or len(requests) > 1
        for request in requests:
            self.engine.submit(request)
        try:
            if streams:
                return await self._stream(http, body, requests, queue, many)
            async for _ in _until_done(requests, queue):
                pass
            answers = [self._answer(request, body) for request in requests]
            return web.Response(body=_json(answers if many else answers[0]), content_type="application/json")
        except (asyncio.CancelledError, ConnectionError):  # the client has disconnected
            await asyncio.shield(asyncio.to_thread(self.engine.withdraw, requests))
            raise

    def _request(
        self,
        body: Mapping[str, Any],
        rid: str,
        prompt: list[int],
        output: list[int],
        params: SamplingParams,
        seed: int,
        notify: Callable[[Request], None],
    ) -> Request:
        """The request for one answer. prompt: other answers may share it. output: earlier tokens that the answer continues."""
        wanted, given = bool(body.get("return_logprob")), len(output)
        start = body.get("logprob_start_len")
        start = whole("logprob_start_len", -1 if start is None else start, -1, LARGEST)
        priority = whole("priority", body.get("priority") or 0, -LARGEST - 1, LARGEST)
        most = min(MOST_TOPS, self.engine.shape.vocab)
        tops = whole("top_logprobs_num", body.get("top_logprobs_num") or 0, 0, most)
        first = body.get("routed_experts_start_len")
        first = whole("routed_experts_start_len", 0 if first is None else first, 0, len(prompt) + given)
        # as if it had never been interrupted: limits count from the first token of the earlier output
        if given:
            params = replace(
                params,
                max_new_tokens=params.max_new_tokens + given,
                min_new_tokens=params.min_new_tokens + given,
            )
        return Request(
            rid=rid,
            prompt=prompt,
            output=output,
            given=given,
            priority=priority,
            params=params,
            adapter=self.engine.adapter(named_adapter(body)),
            seed=seed,
            notify=notify,
            top_logprobs=tops if wanted else 0,
            prompt_logprobs_from=start if wanted else -1,
            routed_from=first if body.get("return_routed_experts") else -1,
        )

    async def _with_pictures(
        self, body: Mapping[str, Any], prompts: list[list[int]], single: bool
    ) -> tuple[list[list[int]], SeenImages | None]:
        """The prompts with all tokens of their pictures, which only a request of one prompt may have."""
        data = body.get("image_data")
        if data is None or data == []:
            return prompts, None
        tower = self.engine.tower
        if tower is None:
            raise RequestError("image_data: this model sees no pictures")
        if not single:
            raise RequestError("image_data: send prompts with pictures one by one")
        prompt, seen = await self._call(lambda: tower.expanded(prompts[0], data))
        return [prompt], seen

    def _prompts(self, body: Mapping[str, Any]) -> tuple[list[list[int]], bool]:
        ids, text = body.get("input_ids"), body.get("text")
        if (ids is None) == (text is None):
            raise RequestError("input_ids, text: send exactly one of them")
        if text is not None:
            if not isinstance(text, str | list) or not all(
                isinstance(t, str) for t in ([text] if isinstance(text, str) else text)
            ):
                raise RequestError("text: a string or a list of strings is wanted")
            texts = [text] if isinstance(text, str) else text
            return [self.engine.text.encode(t) for t in texts], isinstance(text, str)
        if not isinstance(ids, list) or not ids:
            raise RequestError("input_ids: a list of token ids, or a list of such lists, is wanted")
        single = not isinstance(ids[0], list)
        prompts = [ids] if single else ids
        for prompt in prompts:
            if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
                raise RequestError("input_ids: every token id must be an integer")
        return prompts, single

    def _rids(self, body: Mapping[str, Any], count: int, single: bool) -> list[str]:
        rid = body.get("rid")
        if rid is None:
            return [uuid.uuid4().hex for _ in range(count)]
        if isinstance(rid, str):
            return [rid] if single else [f"{rid}_{number}" for number in range(count)]
        if not isinstance(rid, list) or len(rid) != count or not all(isinstance(item, str) for item in rid):
            raise RequestError(f"rid: a string, or {count} of them, is wanted")
        return rid

    async def _stream(
        self,
        http: web.Request,
        body: Mapping[str, Any],
        requests: list[Request],
        queue: News,
        many: bool,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        async for at, made in _until_done(requests, queue):
            answer = self._answer(requests[at], body, made)
            if many:
                answer["index"] = at
            await response.write(b"data: " + _json(answer) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _answer(self, request: Request, body: Mapping[str, Any], made: int | None = None) -> dict[str, Any]:
        """SGLang's answer for a request's tokens so far. made: use only this many tokens, since it may have more by now."""
        over = made is None or (request.finish is not None and made == len(request.output) - request.given)
        ids = list(request.output[request.given :][:made])
        text = self._text(request) if over else self.engine.text.decode(ids, request.params)
        spans = [dict(span) for span in request.spans if made is None or span["start"] < made]
        if spans and not over:
            spans[-1]["end"] = made
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish if over else None,
            "prompt_tokens": len(request.prompt) + request.given,
            "completion_tokens": len(ids),
            "cached_tokens": request.cached_tokens,
            "weight_version": spans[-1]["version"] if spans else self.engine.weight_version,
            "weight_versions": spans,
            "e2e_latency": time.time() - request.arrived,
        }
        form = self.engine.routing
        if over and request.routed_from >= 0 and form is not None:
            fed = [row.numpy() for row in request.routed[request.routed_from :]]
            meta["routed_experts"] = form.to_engine(fed)
        if body.get("return_logprob"):
            show = bool(body.get("return_text_in_logprobs"))
            pairs = zip(request.logprobs[: len(ids)], ids, strict=False)
            meta["output_token_logprobs"] = [
                [value, token, self._token_text(token, show)] for value, token in pairs
            ]
            meta["input_token_logprobs"] = [
                [value, token, self._token_text(token, show)] for value, token in request.prompt_logprobs
            ]
            if request.top_logprobs:
                meta["output_top_logprobs"] = [self._shown(tops, show) for tops in request.tops]
                meta["input_top_logprobs"] = [
                    None if tops is None else self._shown(tops, show) for tops in request.prompt_tops
                ]
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _text(self, request: Request) -> str:
        if request.stopped_text is not None and not request.given:
            return request.stopped_text
        ids = list(request.output[request.given :])
        matched = (request.finish or {}).get("matched")
        if isinstance(matched, int) and not request.params.no_stop_trim:
            ids = ids[:-1]
        return self.engine.text.decode(ids, request.params)

    def _shown(self, pairs: Iterable[tuple[float, int]], show: bool) -> list[list[Any]]:
        return [[value, token, self._token_text(token, show)] for value, token in pairs]

    def _token_text(self, token: int, show: bool) -> str | None:
        return self.engine.text.decode([token], SamplingParams(skip_special_tokens=False)) if show else None

    # control

    async def abort_request(self, http: web.Request) -> web.Response:
        """End requests by rid prefix, or all of them."""
        body = await read_json(http)
        everything, rid = bool(body.get("abort_all")), body.get("rid") or ""
        if not isinstance(rid, str):
            raise RequestError(f"rid: it is {type(rid).__name__}, a text is wanted")
        if not everything and not rid:
            raise RequestError("rid, abort_all: one of them is needed")
        count = await asyncio.to_thread(self.engine.abort, rid, everything)
        return web.json_response({"success": True, "aborted": count})

    async def pause_generation(self, http: web.Request) -> web.Response:
        """Stop stepping, in one of SGLang's three modes."""
        mode = (await read_json(http)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise RequestError(f"mode: {mode!r} is not abort, retract or in_place")
        await self._call(lambda: self.engine.pause(mode))
        return web.json_response({"success": True, "message": f"paused ({mode})"})

    async def continue_generation(self, http: web.Request) -> web.Response:
        """Continue stepping."""
        await self._call(self.engine.resume)
        return web.json_response({"success": True, "message": "continued"})

    async def flush_cache(self, http: web.Request) -> web.Response:
        """Forget cached prompts; 400 while a request runs."""
        if not await self._call(self.engine.flush):
            raise RequestError("flush_cache: requests are running or waiting")
        return web.json_response({"success": True})

    async def start_profile(self, http: web.Request) -> web.Response:
        """Trace the next num_steps steps, into output_dir."""
        body = await read_json(http)
        folder, steps = body.get("output_dir"), whole("num_steps", body.get("num_steps"), 1, LARGEST)
        if not isinstance(folder, str):
            raise RequestError("start_profile: output_dir: a folder is wanted")
        await self._call(lambda: self.engine.start_trace(folder, steps))
        return web.Response(text="Start profiling.\n")

    async def stop_profile(self, http: web.Request) -> web.Response:
        """Write the trace that is under way."""
        await self._call(self.engine.stop_trace)
        return web.Response(text="Stop profiling.\n")

    async def release_memory(self, http: web.Request) -> web.Response:
        """Mark memory as released; on a CPU only the prompt cache is really freed. The engine must be idle."""
        tags = set((await read_json(http)).get("tags") or ("weights", "kv_cache", "cuda_graph"))
        _check_tags(tags)
        if not await self._call(self.engine.flush):
            raise RequestError("release_memory_occupation: requests are running or waiting")
        self.engine.released |= tags
        await self._call(lambda: self.engine.pause("in_place"))
        return web.json_response({"success": True})

    async def resume_memory(self, http: web.Request) -> web.Response:
        """Take memory back; serving continues once no memory is released."""
        tags = set((await read_json(http)).get("tags") or ("weights", "kv_cache", "cuda_graph"))
        _check_tags(tags)
        self.engine.released -= tags
        if not self.engine.released:
            await self._call(self.engine.resume)
        return web.json_response({"success": True})

    # information

    async def health(self, http: web.Request) -> web.Response:
        """200 while the engine's thread lives."""
        if self.engine.failure:
            return web.json_response({"error": {"message": str(self.engine.failure)}}, status=503)
        return web.Response()

    async def health_generate(self, http: web.Request) -> web.Response:
        """200 after a token was generated."""
        queue: News = asyncio.Queue()
        params = SamplingParams(max_new_tokens=1, temperature=0)
        notify = _notifier(asyncio.get_running_loop(), queue, 0)
        self.engine.submit(
            Request(rid=f"health-{uuid.uuid4().hex}", prompt=[0], params=params, seed=0, notify=notify)
        )
        await queue.get()
        return await self.health(http)

    async def server_info(self, http: web.Request) -> web.Response:
        """Settings, load and counters."""
        engine = self.engine
        return web.json_response(
            {
                **self.info,
                "weight_version": engine.weight_version,
                "paused": engine.paused,
                "released": sorted(engine.released),
                "load": engine.load(),
                "counters": dict(engine.counters),
            }
        )

    async def model_info(self, http: web.Request) -> web.Response:
        """The served model and its weight version."""
        return web.json_response(
            {
                "model_path": self.info["model_path"],
                "tokenizer_path": self.info["model_path"],
                "is_generation": True,
                "weight_version": self.engine.weight_version,
            }
        )

    async def loads(self, http: web.Request) -> web.Response:
        """Requests and tokens held, under SGLang's names."""
        load = self.engine.load()
        shown = {
            "dp_rank": 0,
            "num_running_reqs": load["running"],
            "num_waiting_reqs": load["waiting"],
            "num_used_tokens": load["held"],
            "max_total_num_tokens": self.engine.max_total_tokens,
        }
        return web.json_response({"loads": [shown]})

    async def _call(self, job: Callable[[], Any], *, when_idle: bool = False) -> Any:
        return await asyncio.to_thread(self.engine.call, job, when_idle=when_idle)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (RequestError, ModelError, RecursionError) as error:
        said = "the body is nested too deeply" if isinstance(error, RecursionError) else str(error)
        message = {"object": "error", "message": said, "type": "BadRequestError", "code": 400}
        return web.json_response({**message, "success": False, "error": message}, status=400)


def _json(answer: Any) -> bytes:
    """An answer as JSON bytes. Numbers that are not finite become null, as in SGLang."""
    return orjson.dumps(answer)


def _notifier(
    loop: asyncio.AbstractEventLoop, queue: News, at: int, every: int = 0
) -> Callable[[Request], None]:
    """A callback that reports a request's first token, then every `every`-th token, and its end; 0: only its end."""

    def notify(request: Request) -> None:
        made = len(request.output) - request.given
        if request.finish or (every and made % every == 1 % every):
            loop.call_soon_threadsafe(queue.put_nowait, (at, made, request.finish is not None))

    return notify


async def _until_done(requests: list[Request], queue: News) -> AsyncIterator[tuple[int, int]]:
    """Yields the number and the count of tokens of each request with news, until all requests have ended."""
    open_ = set(range(len(requests)))
    while open_:
        at, made, over = await queue.get()
        if at in open_:
            if over:
                open_.discard(at)
            yield at, made


def _check_tags(tags: set[str]) -> None:
    unknown = tags - {"weights", "kv_cache", "cuda_graph"}
    if unknown:
        raise RequestError(f"tags: {sorted(unknown)[0]!r} is not weights, kv_cache or cuda_graph")


def _continued(http: web.Request) -> int:
    """The number of last input ids that are output of the same answer. Raises RequestError."""
    given = http.headers.get(CONTINUED, "0")
    if not (given.isascii() and given.isdigit() and len(given) <= DIGITS):
        raise RequestError(f"{CONTINUED}: a count of tokens is wanted")
    return int(given)
