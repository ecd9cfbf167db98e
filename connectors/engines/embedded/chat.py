"""OpenAI's chat completions over the engine, for clients that train nothing, such as a judge.

Owns rendering messages by the folder's chat template, and the form of the answer. One completion per request, not streamed.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from aiohttp import web

from millrace.connectors.engines.embedded.body import read_json
from millrace.connectors.engines.embedded.engine import Engine
from millrace.connectors.engines.embedded.sampling import RequestError, SamplingParams
from millrace.connectors.engines.embedded.slots import Request
from millrace.core.families.chat_templates import (
    TemplateLimitError,
    TemplateRefusedError,
    apply_template,
)
from millrace.core.sessions.completions import BadRequestError, completion, read_messages
from millrace.core.sessions.history import TurnKey
from millrace.core.sessions.interface import Turn

SAMPLING = {  # OpenAI's parameters, and the engine's names for them
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "seed": "sampling_seed",
    **{name: name for name in ("temperature", "top_p", "stop", "presence_penalty", "frequency_penalty")},
}
ONLY = TurnKey(branch=0, index=0, endpoint=0, before=None, new=(), options="")
READ = ("model", "messages", "n", "stream", "user", *SAMPLING)


class ChatRoute:
    """The handler for one engine. `text_of`: returns the text of a request that has ended."""

    def __init__(self, engine: Engine, folder: str, text_of: Callable[[Request], str]) -> None:
        self.engine = engine
        self._folder = folder
        self._text_of = text_of

    def add_to(self, app: web.Application) -> None:
        """Add the route."""
        app.router.add_post("/v1/chat/completions", self.complete)

    async def complete(self, http: web.Request) -> web.Response:
        """One answer to some messages."""
        body = await read_json(http)
        params = read_params(body)
        prompt = await asyncio.to_thread(self._rendered, body.get("messages"))
        self.engine.check(prompt, params)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def notify(request: Request) -> None:
            if request.finish:
                loop.call_soon_threadsafe(ended.set)

        seed = self.engine.draw_seed() if params.sampling_seed is None else params.sampling_seed
        request = Request(rid=uuid.uuid4().hex, prompt=prompt, params=params, seed=seed, notify=notify)
        self.engine.submit(request)
        try:
            await ended.wait()
        except asyncio.CancelledError:  # the client has disconnected
            await asyncio.shield(asyncio.to_thread(self.engine.withdraw, [request]))
            raise
        return web.json_response(self._answer(request, str(body.get("model") or self._folder)))

    def _rendered(self, messages: Any) -> list[int]:
        """Token ids of the prompt."""
        try:
            read = read_messages(messages)
        except BadRequestError as error:
            raise RequestError(str(error)) from error
        if self._tokenizer.chat_template is None:
            raise RequestError("messages: this model has no chat template; use /generate")
        try:
            text = apply_template(self._tokenizer, read, for_answer=True)
        except (TemplateRefusedError, TemplateLimitError) as error:
            raise RequestError(f"messages: the chat template of {self._folder} refuses: {error}") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer, loaded at the first request, since rollouts send token ids and need none."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)

    def _answer(self, request: Request, model: str) -> dict[str, Any]:
        assert request.finish is not None
        if request.finish["type"] == "abort":
            raise RequestError(f"the request was ended: {request.finish.get('message', 'aborted')}")
        text = self._text_of(request)
        truncated = request.finish["type"] == "length"
        turn = Turn(
            text=text,
            content=text,
            output_ids=request.output,
            status="truncated" if truncated else "completed",
            prompt_tokens=len(request.prompt),
        )
        answer = completion(ONLY, turn, model, int(time.time()))
        return {**answer, "id": f"chatcmpl-{request.rid}"}


def read_params(body: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a request. Raises RequestError naming a field that is unknown or not supported."""
    given = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(set(given) - set(READ))
    if unknown:
        raise RequestError(f"{unknown[0]}: not supported by this engine")
    if given.get("n", 1) != 1 or given.get("stream"):
        raise RequestError("n, stream: one completion is given, and it is not streamed")
    return SamplingParams.parse({SAMPLING[name]: value for name, value in given.items() if name in SAMPLING})
