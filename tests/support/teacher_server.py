"""A real HTTP server that answers as vLLM's and OpenAI's completions do, from a plain forward pass of a small model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer
from torch import Tensor

from tests.support.engine_process import reference_logits, reference_logprobs
from tests.support.loopback import listening

MOST = 20  # as vLLM's --max-logprobs


class TeacherServer:
    """Serves a folder. `spoil` changes an answer before it is sent; `refuse` answers so many requests with 503 first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.refuse = 0
        self.spoil: Any = None
        self.url = ""

    async def completions(self, request: web.Request) -> web.Response:
        """One prompt, as text or ids."""
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if self.refuse:
            self.refuse -= 1
            return web.Response(status=503, text="later")
        prompt = body["prompt"]
        ids: list[int] = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        values = [None, *reference_logprobs(self.folder, ids[:1], ids[1:])]
        texts = [self.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        choice: dict[str, Any] = {"text": "!", "finish_reason": "length"}
        if "prompt_logprobs" in body:
            wanted = body["prompt_logprobs"]
            if wanted > MOST:
                return web.json_response({"error": f"up to {MOST} log-probabilities"}, status=400)
            logprobs = reference_logits(self.folder, ids[:1], ids[1:]).log_softmax(-1)
            entries = [self._entry(row, token, wanted) for row, token in zip(logprobs, ids[1:], strict=True)]
            choice["prompt_logprobs"] = [None, *entries]
        if body.get("echo"):
            choice["logprobs"] = {"tokens": [*texts, "!"], "token_logprobs": [*values, -1.0]}
        answer = {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}
        return web.json_response(self.spoil(answer) if self.spoil else answer)

    def _entry(self, logprobs: Tensor, token: int, wanted: int) -> dict[str, Any]:
        """As vLLM shows a token of a prompt: itself first, then those of the `wanted` likeliest that are others."""
        order = logprobs.argsort(descending=True).tolist()
        return {
            str(each): {
                "logprob": float(logprobs[each]),
                "rank": order.index(each) + 1,
                "decoded_token": self.tokenizer.decode([each], skip_special_tokens=False),
            }
            for each in dict.fromkeys([token, *order[:wanted]])
        }


@asynccontextmanager
async def teacher_server(folder: Path) -> AsyncIterator[TeacherServer]:
    """It listens on the loopback meanwhile."""
    server = TeacherServer(folder)
    async with listening(server.completions, "/v1/completions") as address:
        server.url = f"{address}/v1"
        yield server
