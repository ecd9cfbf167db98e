"""Serves sessions over HTTP, as OpenAI's chat completions, for rollout functions that use their own client.

Owns one server on this process's loopback address, and access to it: a request needs the key of a running rollout, must be
JSON, and must not come from a web page. Knows nothing of what a request means: core/sessions reads it and places it in a session.
"""

import asyncio
import contextvars
import json
import secrets
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import BasicAuth, web
from aiohttp.typedefs import Handler, Middleware

from millrace.core.sessions.completions import BadRequestError, chunks, completion, models, read_request
from millrace.core.sessions.interface import LimitReachedError, SessionError, TooLongError, Turn
from millrace.core.sessions.live import LiveSession, ServedRollout

HERE = "127.0.0.1"
NAMES = (HERE, "localhost", "[::1]")
BODY_LIMIT = 1 << 26
Made = TypeVar("Made")


@dataclass(frozen=True)
class _Endpoint:
    session: LiveSession
    rollout: ServedRollout
    context: contextvars.Context  # the rollout's, so that work done in it counts as the rollout's


class SessionServer:
    """The server of one process. Starts when the first session is served."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """tools: schemas of the configured tools."""
        self._tools = tools
        self._endpoints: dict[str, _Endpoint] = {}  # by key
        self._address: str | None = None
        self._starting: asyncio.Task[None] | None = None

    def serve(self, session: LiveSession, rollout: ServedRollout) -> tuple[str, str]:
        """Open an endpoint for a session, and return its URL and key. Call it in the loop's thread."""
        if self._address is None:
            # listen now, so that a client that connects before the server runs waits instead of failing
            listening = socket.create_server((HERE, 0), backlog=1024)
            # an empty context, so that time spent in the server counts for no session
            self._starting = asyncio.get_running_loop().create_task(
                self._start(listening), context=contextvars.Context()
            )
            self._address = f"http://{HERE}:{listening.getsockname()[1]}/v1"
        key = secrets.token_urlsafe(32)
        self._endpoints[key] = _Endpoint(session, rollout, contextvars.copy_context())
        rollout.keys.append(key)
        return self._address, key

    def close(self, rollout: ServedRollout) -> None:
        """End a rollout: its keys are refused from now on, and answers in progress are cancelled."""
        for key in rollout.keys:
            del self._endpoints[key]
        for task in list(rollout.working):
            task.cancel()

    async def _start(self, listening: socket.socket) -> None:
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_errors, self._middleware()])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listening).start()

    def _middleware(self) -> Middleware:
        """Check access before every handler, also for unknown paths."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            refusal = self._refusal(request)
            return _error(*refusal) if refusal else await handler(request)

        return check

    def _refusal(self, http: web.Request) -> tuple[int, str] | None:
        """Status and reason if a request is refused, else None."""
        if http.headers.get("Host", "").rpartition(":")[0].lower() not in NAMES:
            return 403, "Host: it names another machine"
        if "Origin" in http.headers:
            return 403, "Origin: web pages may not ask"
        if _key(http) not in self._endpoints:
            return 401, "the header Authorization wants the api_key of a session, as a Bearer token"
        if http.body_exists and http.content_type != "application/json":
            return 415, "Content-Type: application/json is wanted"
        return None

    async def _models(self, http: web.Request) -> web.StreamResponse:
        return web.json_response(models())

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        """SGLang's /generate, for functions written for SGLang."""
        endpoint = self._endpoints[_key(http)]
        rollout = endpoint.rollout
        if rollout.native is None:
            raise web.HTTPNotFound(reason="this rollout is asked by chat completions")
        answer = _working(endpoint, rollout.native(await _body(http)))
        return web.json_response(await _given(rollout, answer))

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        endpoint = self._endpoints[_key(http)]
        rollout = endpoint.rollout
        request = read_request(await _body(http), self._tools, rollout.sampling)

        def spawn(work: Coroutine[Any, Any, Turn]) -> asyncio.Task[Turn]:
            return _working(endpoint, work)

        place, answer = endpoint.session.turn_of(request.messages, request.max_tokens, request.stop, spawn)
        created = rollout.created.setdefault(place, int(time.time()))
        turn = await _given(rollout, answer)
        found = completion(place, turn, request.model, created)
        if not request.stream:
            return web.json_response(found)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        for chunk in chunks(found, request.usage):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn a handler's errors into answers in OpenAI's form. They have status 400, which clients do not retry."""
    try:
        return await handler(request)
    except BadRequestError as error:
        return _error(400, str(error), param=error.field)
    except RecursionError:
        return _error(400, "body: it is nested too deeply")
    except TooLongError as error:
        return _error(413, str(error), param="messages", code="limit_reached")
    except LimitReachedError as error:
        return _error(400, f"a limit of the rollout is reached: {error}", code="limit_reached")
    except SessionError as error:
        return _error(400, f"the rollout cannot go on: {error}", code="refused")
    except web.HTTPException as error:
        return _error(error.status, error.reason)


async def _body(http: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await http.read())
    except ValueError as error:
        raise BadRequestError("body", f"it is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("body", "an object is wanted")
    return body


def _working(endpoint: _Endpoint, work: Coroutine[Any, Any, Made]) -> asyncio.Task[Made]:
    """Run the work in a separate task, which continues if the client disconnects and asks again."""
    task = asyncio.get_running_loop().create_task(work, context=endpoint.context.copy())
    endpoint.rollout.working.add(task)
    task.add_done_callback(endpoint.rollout.working.discard)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def _given(rollout: ServedRollout, answer: asyncio.Future[Made]) -> Made:
    """Wait for the work's result. A limit that ended it is kept in the rollout. Raises the work's errors, and HTTPGone."""
    try:
        made = await asyncio.shield(answer)
    except LimitReachedError as error:
        rollout.limit = str(error)
        raise
    except asyncio.CancelledError:
        if answer.cancelled():
            raise web.HTTPGone(reason="the rollout has ended") from None
        raise
    rollout.limit = None
    return made


def _key(http: web.Request) -> str:
    """The key: a Bearer token, or the password in the URL."""
    scheme, _, given = http.headers.get("Authorization", "").partition(" ")
    if scheme == "Basic":
        try:
            return str(BasicAuth.decode(f"Basic {given}").password)
        except ValueError:
            return ""
    return given if scheme == "Bearer" else ""


def _error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}, status=status
    )
