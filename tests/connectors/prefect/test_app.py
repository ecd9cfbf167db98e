"""The server retries a request that SQLite refused, with the same body; a client sees only a lasting refusal."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from millrace.connectors.host.local_server import HEADER, POLICY
from millrace.connectors.prefect import app as prefect_app
from millrace.connectors.prefect.app import LARGEST, STRANGERS, PrefectLogin, RetryRefused, guarded


async def ask(refusals: int, parts: list[bytes], raises: bool = False) -> tuple[list[bytes], list[int]]:
    """The bodies that an application saw which refuses `refusals` times, and the statuses that its client got."""
    seen: list[bytes] = []
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        status = 503 if len(seen) <= refusals else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})
        if status == 503 and raises:
            raise OSError("locked")  # as Starlette does after its error handler has answered

    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        for number, part in enumerate(parts)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await RetryRefused(app)({"type": "http"}, receive, send)
    return seen, statuses


async def test_a_refused_request_is_retried_with_its_whole_body() -> None:
    assert await ask(2, [b"ab", b"c"]) == ([b"abc"] * 3, [200])
    assert await ask(2, [b"ab", b"c"], raises=True) == ([b"abc"] * 3, [200])


async def test_an_answer_comes_at_once() -> None:
    assert await ask(0, [b""]) == ([b""], [200])


async def test_a_lasting_refusal_reaches_the_client() -> None:
    prefect_app.WAIT_S, waited = 0.0, prefect_app.WAIT_S
    try:
        seen, statuses = await ask(1000, [b"a"])
    finally:
        prefect_app.WAIT_S = waited
    assert (len(seen), statuses) == (prefect_app.ATTEMPTS, [503])


async def test_an_error_that_is_no_refusal_is_raised() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise OSError("broken")

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        raise AssertionError

    with pytest.raises(OSError, match="broken"):
        await RetryRefused(app)({"type": "http"}, receive, send)


class Request:
    """A client that sends a body without end; counts what was read of it."""

    def __init__(self, size: int, login: str = "", declared: bool = False) -> None:
        self.left, self.read = size, 0
        self.statuses: list[int] = []
        self.policies: list[bytes] = []
        headers = [(b"authorization", b"Basic " + base64.b64encode(login.encode()))] if login else []
        headers += [(b"content-length", str(size).encode())] if declared else []
        self.scope: Any = {"type": "http", "headers": headers}

    async def receive(self) -> Any:
        part = bytes(min(self.left, 1 << 20))
        self.left, self.read = self.left - len(part), self.read + len(part)
        return {"type": "http.request", "body": part, "more_body": self.left > 0}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
            self.policies += [value for name, value in message["headers"] if name == HEADER]


async def prefects(scope: Any, receive: Any, send: Any) -> None:
    """Answers as Prefect does: when it has the whole body."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    ("size", "login", "status", "most"),
    [
        (1_000, "", 200, STRANGERS),  # what it may see, Prefect itself says
        (1_500 << 20, "", 401, STRANGERS),
        (1_500 << 20, "user:wrong", 401, STRANGERS),
        (32 << 20, "user:right", 200, LARGEST),
        (1_500 << 20, "user:right", 413, LARGEST),
    ],
)
async def test_a_body_is_bounded_before_it_is_held(
    size: int, login: str, status: int, most: int, declared: bool
) -> None:
    request = Request(size, login, declared)
    await PrefectLogin(RetryRefused(prefects), "user:right")(request.scope, request.receive, request.send)
    assert request.statuses == [status]
    assert request.read <= min(size, most + (1 << 20))
    assert request.read == 0 or status == 200 or not declared


async def test_a_length_that_is_no_number_is_refused() -> None:
    request = Request(10)
    request.scope["headers"] = [(b"content-length", b"-1")]
    await PrefectLogin(RetryRefused(prefects), "user:right")(request.scope, request.receive, request.send)
    assert request.statuses == [401]


@pytest.mark.parametrize(("size", "status"), [(1_000, 200), (1_500 << 20, 401)])
async def test_every_answer_says_that_its_page_may_ask_this_server_only(size: int, status: int) -> None:
    request = Request(size)
    await guarded(prefects, "user:right")(request.scope, request.receive, request.send)
    assert (request.statuses, request.policies) == ([status], [POLICY.encode()])
