"""A teacher behind a server: its log-probabilities for tokens that the policy generated.

Owns the three protocols and how their answers are parsed. Tokens are sent as ids. If the protocol returns ids, an answer about
other tokens is refused. Knows nothing of tasks or files.

- sglang: /generate without new tokens; the input's log-probabilities at temperature 1 from `logprob_start_len` on, and with
  `top_logprobs_num` the likeliest tokens at each position.
- vllm: completions with `prompt_logprobs`, for each prompt token a mapping by token id that includes the likeliest tokens.
- openai: completions with `echo`, which returns the prompt's tokens only as text.
"""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from millrace.connectors.http.posting import EXCERPT, UnreadableError, post
from millrace.core.config.algorithm.section import TeacherServer
from millrace.core.contracts.references import resolved

FIELD = "algorithm.teacher_server"
LARGEST = 64 << 20  # bytes; a longer answer is refused


class PromptToken(NamedTuple):
    """A token of the prompt, as the server returns it. The first token has no log-probability."""

    id: int | None  # None if the protocol does not return ids
    text: str | None
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()  # the likeliest tokens at its position, and log-probabilities


class ResponseLogprobs(NamedTuple):
    """A teacher's log-probabilities for a response, in nats."""

    logprobs: list[float]  # of each token, given all tokens before it
    top_tokens: list[int] | None = None  # `top_k` likeliest tokens for each position, in one flat list
    top_logprobs: list[float] | None = None


class ServedTeacher:
    """Asks one server, for at most `concurrency` samples at once."""

    def __init__(self, server: TeacherServer) -> None:
        self.server = server
        self._free = asyncio.Semaphore(server.concurrency)

    async def logprobs(self, tokens: Sequence[int], response_length: int) -> ResponseLogprobs:
        """Log-probability of each of the last `response_length` tokens, given all tokens before it.

        Errors: UnreachableError, RefusedError, UnreadableError; ConfigError if the key is not set.
        """
        assert 0 < response_length < len(tokens), "a response follows a prompt"
        start = len(tokens) - response_length - 1
        async with self._free:
            whole = await self._shown(list(tokens), start, self.server.top_k)
        shown, response = whole[-response_length:], list(tokens[-response_length:])
        same = [token.id for token in shown] == response
        # the openai protocol returns no ids, so there is nothing to compare
        if self.server.protocol == "openai":
            same = len(whole) == len(tokens)
        if not same:
            raise self._unreadable("it is about other tokens than were sent")
        values = [token.logprob for token in shown]
        wrong = next(
            (at for at, value in enumerate(values) if value is None or not math.isfinite(value)), None
        )
        if wrong is not None:
            raise self._unreadable(
                f"token {response[wrong]}, number {wrong} of the response, has log-probability {values[wrong]}"
            )
        found = [value for value in values if value is not None]
        return ResponseLogprobs(found, *self._tops(shown)) if self.server.top_k else ResponseLogprobs(found)

    def _tops(self, shown: Sequence[PromptToken]) -> tuple[list[int], list[float]]:
        """The likeliest tokens at each position, and their log-probabilities. Errors: UnreadableError."""
        wanted = self.server.top_k
        for at, token in enumerate(shown):
            if len({each for each, _ in token.top}) != wanted or len(token.top) != wanted:
                raise self._unreadable(
                    f"it has {len(token.top)} likeliest tokens for token {at} of the response, not {wanted}"
                )
            if not all(math.isfinite(value) for _, value in token.top):
                raise self._unreadable(
                    f"a likeliest token for token {at} of the response has no finite log-probability"
                )
        pairs = [pair for token in shown for pair in token.top]
        return [token for token, _ in pairs], [value for _, value in pairs]

    async def tokenised(self, text: str) -> list[PromptToken]:
        """A text, tokenised by the server. Raises the errors of `logprobs`."""
        async with self._free:
            return await self._shown(text, 0, 0)

    async def _shown(self, prompt: str | list[int], start: int, top_k: int) -> list[PromptToken]:
        """The prompt's tokens with the `top_k` likeliest at each position. SGLang returns them from `start` on."""
        if self.server.protocol == "sglang":
            sent = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
            answer = await self._post(
                "generate",
                {
                    **sent,
                    "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                    "return_logprob": True,
                    "logprob_start_len": start,
                    "return_text_in_logprobs": isinstance(prompt, str),
                    **({"top_logprobs_num": top_k} if top_k else {}),
                },
            )
            return self._read(answer, _of_sglang)
        body = {"model": self.server.model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0}
        if self.server.protocol == "vllm":
            return self._read(
                await self._post("completions", {**body, "prompt_logprobs": max(1, top_k)}),
                partial(_of_vllm, top_k=top_k),
            )
        answer = await self._post("completions", {**body, "echo": True, "logprobs": 1})
        return self._read(answer, _of_openai)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        server = self.server
        key = resolved(server.key, f"{FIELD}.key")
        return await post(
            f"{server.url.rstrip('/')}/{path}",
            body,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout_s=server.timeout_s,
            attempts=server.attempts,
            asker=FIELD,
            largest=LARGEST,
        )

    def _read(self, answer: Any, read: Any) -> list[PromptToken]:
        try:
            found: list[PromptToken] = read(answer)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._unreadable(
                f"it holds no log-probabilities of the prompt: {json.dumps(answer)[:EXCERPT]}"
            ) from error
        return found

    def _unreadable(self, reason: str) -> UnreadableError:
        return UnreadableError(
            f"the teacher's answer cannot be used: {reason}",
            where=self.server.url,
            remedy=f"look at {FIELD}.protocol, and whether the server gives log-probabilities of prompts",
        )


def _of_sglang(answer: Any) -> list[PromptToken]:
    meta = answer["meta_info"]
    shown = meta["input_token_logprobs"]
    tops = meta.get("input_top_logprobs") or [None] * len(shown)
    return [
        PromptToken(token, text, value, [(each, at) for at, each, _ in top or ()])
        for (value, token, text), top in zip(shown, tops, strict=True)
    ]


def _of_vllm(answer: Any, top_k: int) -> list[PromptToken]:
    """Parse vLLM's answer. The first token is null; each further one is a mapping whose first entry is the prompt's token. The
    likeliest tokens have ranks from 1 on. The prompt's token may be one of them; otherwise it is an additional entry."""
    found = [PromptToken(None, None, None)]
    for entry in answer["choices"][0]["prompt_logprobs"][1:]:
        token, shown = next(iter(entry.items()))
        ranked = [(value.get("rank"), int(each), value["logprob"]) for each, value in entry.items()]
        top = [(each, value) for rank, each, value in ranked if rank is not None and rank <= top_k]
        found.append(PromptToken(int(token), shown.get("decoded_token"), shown["logprob"], top))
    return found


def _of_openai(answer: Any) -> list[PromptToken]:
    """Parse an OpenAI-compatible answer: the prompt's tokens and one generated token, as text. Its usage counts the prompt's."""
    shown = answer["choices"][0]["logprobs"]
    count = answer["usage"]["prompt_tokens"]
    values, texts = shown["token_logprobs"][:count], shown["tokens"][:count]
    if len(values) != count or values[0] is not None:
        raise ValueError("no echo")
    return [PromptToken(None, text, value) for text, value in zip(texts, values, strict=True)]
