"""The server retries a request that SQLite refused, with the same body; a client sees only a lasting refusal."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.connectors.prefect import app as prefect_app
from millrace.connectors.prefect.app import RetryRefused


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
