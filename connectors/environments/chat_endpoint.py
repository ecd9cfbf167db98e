"""One rollout as a server of chat completions, for code that brings its own loop: who asks there is answered by the policy.

Whole histories come in. What continues a dialogue adds only what is new to it; another history is a branch of the rollout. A
request that asks for other sampling than the run's, or for what is not done here, is refused with the field.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from millrace.core.sessions.completions import read_request
from millrace.core.sessions.interface import SessionError, Turn
from millrace.core.sessions.live import LiveSession

Plain = tuple[str, str]  # role and text
MAX_BODY = 1 << 28  # bytes


@dataclass
class _Line:
    """A dialogue as it was said so far."""

    session: LiveSession
    said: list[Plain]


class ChatEndpoint:
    """Serves one session on this host, at an address that nobody can guess. `problem`: the first thing that went wrong."""

    def __init__(self, session: LiveSession) -> None:
        self._sampling = session.sampling
        prompt = session.task.prompt
        opening = [("user", prompt)] if isinstance(prompt, str) else [_plain(message) for message in prompt]
        self._lines = [_Line(session, opening)]
        self.url = ""
        self.problem: Exception | None = None

    async def __aenter__(self) -> ChatEndpoint:
        """Begin to serve."""
        place = f"/{secrets.token_urlsafe(16)}/v1"
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post(f"{place}/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}{place}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """End it."""
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            if body.get("tools"):
                raise SessionError("the environment gives the model tools, which are not passed on")
            asked = read_request(body, (), self._sampling)
            turn = await self._turn(asked.messages, asked.max_tokens, asked.stop)
        except Exception as error:  # noqa: BLE001 - the rollout ends with it, whatever the caller makes of the answer
            self.problem = self.problem or error
            return web.json_response({"error": {"message": str(error), "type": "rollout"}}, status=400)
        return web.json_response(_completion(turn, body.get("model", "policy")))

    async def _turn(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None, stop: Sequence[str]
    ) -> Turn:
        plain = [_plain(message) for message in messages]
        known = [line for line in self._lines if plain[: len(line.said)] == line.said]
        if known:
            line = max(known, key=lambda each: len(each.said))
            for message in messages[len(line.said) :]:
                line.session.observe({"role": message["role"], "content": _plain(message)[1]})
        elif not self._lines[0].session.turns:
            raise SessionError(
                "the environment begins with other messages than the row's prompt: write the rows with write_prompts"
            )
        else:
            new = [{"role": role, "content": text} for role, text in plain]
            line = _Line(self._lines[0].session.branch(prompt=new), plain)
            self._lines.append(line)
        turn = await line.session.generate(max_new_tokens=max_tokens, stop=stop)
        line.said = [*plain, ("assistant", turn.content)]
        return turn


def _plain(message: Mapping[str, Any]) -> Plain:
    return str(message["role"]), str(message["content"])


def _completion(turn: Turn, model: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.thinking:
        message["reasoning_content"] = turn.thinking
    choice = {"index": 0, "message": message, "finish_reason": "length" if turn.truncated else "stop"}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": 0,  # the run counts its tokens itself
            "completion_tokens": len(turn.output_ids),
            "total_tokens": len(turn.output_ids),
        },
    }
