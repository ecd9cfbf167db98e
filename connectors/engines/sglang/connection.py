"""HTTP to one server: JSON requests, and the error for each kind of failure. Knows no endpoints."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import orjson

from millrace.connectors.engines.sglang.wire.answer_body import DONE, EventReader
from millrace.core.errors import EngineError, EngineLostError

CONTROL_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
# How long an idle connection is reused. SGLang closes one after 5 s, perhaps while the next request is on its way
KEPT_S = 2.0
LARGE = 32768  # bytes; larger answers are parsed in a thread, since many at once would block the event loop
READ_BYTES = 1 << 20  # bytes of an answer that are buffered before the socket waits
JSON = {"Content-Type": "application/json"}
READING = ThreadPoolExecutor(
    1, "answers"
)  # one, since several would wait for one another; the storage of rows has other threads
Parse = Callable[[bytes], Any]
"""Parses the JSON of an answer. Raises ValueError if it is not JSON."""


class Connection:
    """A server at a base URL. `engine_id`: its name in errors. `key`: sent with every request."""

    def __init__(self, url: str, engine_id: str, key: str | None = None) -> None:
        self.url = url
        self.engine_id = engine_id
        self.key = key
        self._closed = False
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout_s: float) -> Any:
        """The answer to a GET. Raises as `send` does."""
        return await self.send("GET", path, None, timeout_s)

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        timeout_s: float | None = CONTROL_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
        parse: Parse = orjson.loads,
    ) -> Any:
        """The answer to a POST. Raises as `send` does."""
        return await self.send("POST", path, body, timeout_s, headers, parse)

    async def send(
        self,
        verb: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
        parse: Parse = orjson.loads,
    ) -> Any:
        """The answer, parsed if it is JSON, otherwise its text.

        Raises EngineLostError if the server cannot be reached, is too slow or answers 5xx; EngineError for other error statuses and
        for broken JSON.
        """
        async with self._answer(verb, path, body, timeout_s, headers) as answer:
            if answer.content_type != "application/json":
                return await answer.text()
            content = await answer.read()
            return await self._read(content, path, parse)

    async def events(
        self,
        path: str,
        body: dict[str, Any],
        headers: Mapping[str, str] | None = None,
        parse: Parse = orjson.loads,
    ) -> AsyncGenerator[Any, None]:
        """The parsed events of a streamed answer to a POST, without a time limit. Raises as `send` does."""
        async with self._answer("POST", path, body, None, headers) as answer:
            reader = EventReader()
            async for received in answer.content.iter_any():
                for data in reader.read(received):
                    if data == DONE:
                        return
                    yield await self._read(data, path, parse)
        raise EngineLostError(f"{self.engine_id}: the answer of {path} was cut off")

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        verb: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float | None,
        headers: Mapping[str, str] | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open an answer with a good status. Raises as `send` does."""
        if self._closed:
            raise EngineLostError(f"{self.engine_id}: this connection is closed")
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            data = None if body is None else orjson.dumps(body)
            headers = {**JSON, **(headers or {})} if data is not None else headers
            request = self._http.request(verb, self.url + path, data=data, timeout=timeout, headers=headers)
            async with request as answer:
                if answer.status in (200, 202):
                    yield answer
                    return
                message = (await answer.text())[:500]
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineLostError(
                f"{self.engine_id}: {path} failed: {type(error).__name__}: {error}"
            ) from error
        if answer.status >= 500:
            raise EngineLostError(f"{self.engine_id}: {path} answered {answer.status}: {message}")
        raise EngineError(f"{self.engine_id}: {path} answered {answer.status}: {message}")

    async def _read(self, content: bytes, path: str, parse: Parse) -> Any:
        if len(content) < LARGE:
            return self._parsed(content, path, parse)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(READING, self._parsed, content, path, parse)

    def _parsed(self, body: bytes, path: str, parse: Parse) -> Any:
        try:
            return parse(body)
        except ValueError as error:  # such as NaN, which JSON does not have
            raise EngineError(f"{self.engine_id}: {path} answered with no JSON: {error}") from error

    async def close(self) -> None:
        """Close the connection; requests in flight are lost."""
        self._closed = True
        if self._session:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self.key}"} if self.key else None
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=headers, read_bufsize=READ_BYTES
            )
        return self._session
