"""Posts JSON to an HTTP server, with retries, for rewards that ask a server.

Owns retries, their pauses, and the error for each kind of failure. Does not follow redirects, since headers may hold a secret.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import aiohttp

from millrace.core.errors import MillraceError
from millrace.core.plain_text import whole_values

LATER = {408, 425, 429, 500, 502, 503, 504}  # statuses of a server that may answer later
LONGEST_PAUSE_S = 30.0
EXCERPT = 200
LARGEST = 1 << 20  # bytes; a longer answer is refused
CHARSETS = (
    "utf-8",
    "utf8",
    "us-ascii",
    "ascii",
    "iso-8859-1",
    "latin-1",
    "windows-1252",
)  # other codecs of Python may be slow or fail


class RemoteRewardError(MillraceError):
    """A reward's server gave no usable answer."""


class UnreachableError(RemoteRewardError):
    """The server could not be reached, or did not answer in time."""


class RefusedError(RemoteRewardError):
    """The server answered with an error. `status` is the HTTP status."""

    def __init__(self, reason: str, where: str, remedy: str, status: int) -> None:
        super().__init__(reason, where=where, remedy=remedy)
        self.status = status


class UnreadableError(RemoteRewardError):
    """The server's answer does not have the expected form."""


async def post(
    url: str,
    body: Any,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    attempts: int = 3,
    pause_s: float = 0.5,
    asker: str = "the reward",
    largest: int = LARGEST,
) -> Any:
    """Post `body` and return the server's answer, parsed from JSON.

    timeout_s: of one attempt. pause_s: before the second attempt; it doubles before each further one, up to 30 s.
    asker: the name for error messages, whose settings a remedy points to. largest: bytes; a longer answer is refused.
    Errors: UnreachableError, RefusedError, UnreadableError.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, trust_env=True) as session:
        for attempt in range(1, attempts + 1):
            try:
                return await _attempt(session, url, body, asker, largest)
            except RemoteRewardError as error:
                again = not isinstance(error, RefusedError) or error.status in LATER
                if attempt == attempts or not again or isinstance(error, UnreadableError):
                    raise
            pause = min(LONGEST_PAUSE_S, pause_s * 2 ** (attempt - 1))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
    raise AssertionError("attempts is at least 1")


async def _attempt(session: aiohttp.ClientSession, url: str, body: Any, asker: str, largest: int) -> Any:
    try:
        async with session.post(url, json=whole_values(body), allow_redirects=False) as answer:
            data = await answer.content.read(largest + 1)
            while len(data) <= largest and (more := await answer.content.read(largest)):
                data += more
            text = data[:largest].decode("utf-8", "replace")
            charset = answer.charset or "utf-8"
            if answer.status >= 300:
                raise RefusedError(
                    f"it answered with status {answer.status}: {text[:EXCERPT].strip()}",
                    url,
                    f"look at the server's log, and at the settings of {asker}",
                    answer.status,
                )
    except TimeoutError as error:
        raise UnreachableError(
            "no answer in time", where=url, remedy=f"raise timeout_s of {asker}, or look at the server"
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise UnreachableError(
            f"cannot be reached: {error or type(error).__name__}",
            where=url,
            remedy="start the server, or correct the url",
        ) from error
    if charset.lower() not in CHARSETS:
        raise UnreadableError(
            f"its answer is in the charset {charset[:EXCERPT]!r}", where=url, remedy="have it answer in UTF-8"
        )
    if len(data) > largest:
        raise UnreadableError(
            f"its answer is longer than {largest} bytes", where=url, remedy="have it answer with less"
        )
    return read_json(data.decode(charset, "replace"), url)


def read_json(text: str, url: str) -> Any:
    """Parse a text as JSON. Errors: UnreadableError."""

    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"its answer is not JSON: {text[:EXCERPT]!r}", where=url, remedy="have it answer with JSON"
        ) from error
