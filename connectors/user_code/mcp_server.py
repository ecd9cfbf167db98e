"""One MCP (Model Context Protocol) server whose tools the policy may call: its process or address, and the connection.

Connects at the first call, and connects again at the next call after the server died. Knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from millrace.core.config.parts.redaction import shown_text
from millrace.core.config.rollout import McpServer as Settings
from millrace.core.contracts.references import resolved, scrubbed
from millrace.core.errors import ConfigError, described
from millrace.core.plain_text import json_text, whole, whole_values
from millrace.core.sessions.interface import ToolError

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.types import CallToolResult, Tool

START_TIMEOUT_S = 60.0  # until a server answers the first time
READ_TIMEOUT_S = 300.0  # of one request by HTTP
# Runs a command that dies with the process that started it, even if that process is killed
END_WITH_PARENT = "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execvp(sys.argv[1], sys.argv[1:])"


class McpConnection:
    """One server and the connection that concurrent calls share."""

    def __init__(self, settings: Settings, field: str) -> None:
        """field: name of the configuration field, for error messages."""
        self._settings, self._field = settings, field
        self._connection: _Connection | None = None

    async def schemas(self) -> list[dict[str, Any]]:
        """The schemas of its tools, shown to the model.

        Errors: ConfigError if the server cannot be reached, or lacks a tool named in `only`.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                client = await self._connected().client()
                found = await client.list_tools()
                tools = list(found.tools)
                while found.next_cursor:
                    found = await client.list_tools(cursor=found.next_cursor)
                    tools += found.tools
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - the program, the network and the package raise anything
            self._connection = None
            raise ConfigError(
                f"the MCP server gives no list of tools: {self._said(error)}",
                where=self._field,
                remedy="start it by hand, and correct command, url, env or headers",
            ) from error
        only = self._settings.only
        missing = sorted(set(only) - {tool.name for tool in tools})
        if missing:
            names = ", ".join(tool.name for tool in tools) or "none"
            raise ConfigError(
                f"the server has no tool {', '.join(missing)}; it has {names}",
                where=f"{self._field}.only",
                remedy="name tools that it has",
            )
        return [_schema(tool) for tool in tools if not only or tool.name in only]

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its answer as text. Any failure is a ToolError. The next call restarts a dead server."""
        connection = self._connected()
        try:
            result = await (await connection.client()).call_tool(tool, whole_values(arguments))
        except Exception as error:  # noqa: BLE001 - as above
            if connection.broken_by(error) and connection is self._connection:
                self._connection = None
                connection.close()
            raise ToolError(f"{tool} failed: {self._said(error)}") from error
        text = as_text(result)
        if result.is_error:
            raise ToolError(f"{tool} failed: {self._clean(text)}")
        return text

    async def close(self) -> None:
        """Close the connection, and stop the server if it was started here."""
        connection, self._connection = self._connection, None
        if connection:
            connection.close()
            await asyncio.wait([connection.task])

    def _connected(self) -> _Connection:
        if self._connection is None or self._connection.ended:
            self._connection = _Connection(self._settings, self._field)
        return self._connection

    def _said(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return self._clean(described(error))

    def _clean(self, text: str) -> str:
        """Replace the server's secrets in a text, since it is stored and shown to the policy."""
        return shown_text(scrubbed(text, [self._settings.env, self._settings.headers]))


class _Connection:
    """A connection in a separate task, so that cancelling the first caller does not close it for the others."""

    def __init__(self, settings: Settings, field: str) -> None:
        self._settings, self._field = settings, field
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.ended = False
        self.task = asyncio.get_running_loop().create_task(self._hold(), context=contextvars.Context())

    async def client(self) -> Client:
        """Wait until the server answers, and return the client that makes calls."""
        return await asyncio.shield(self._opened)

    def broken_by(self, error: Exception) -> bool:
        """Whether the connection is unusable after this error. By HTTP, any error breaks it except the server's own answers."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        answered = isinstance(error, MCPError) and error.code != CONNECTION_CLOSED
        return self.ended or not (answered or isinstance(error, ValueError))

    def close(self) -> None:
        """Ask the task to close the connection."""
        self._closing.set()

    async def _hold(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(START_TIMEOUT_S):
                    client = await stack.enter_async_context(self._make())
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - as above; callers that wait for the client raise it
            if not self._opened.done():
                self._opened.set_exception(error)
                # asyncio warns of an exception that nobody retrieved, and no caller may be waiting
                self._opened.exception()
        finally:
            self.ended = True

    def _make(self) -> Client:
        try:
            from mcp import Client
        except ImportError as error:
            raise ConfigError(
                "MCP servers need the package mcp", where=self._field, remedy="pip install 'millrace[mcp]'"
            ) from error
        return Client(self._started() if self._settings.command else self._requests())

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[Any]:
        """Start the server and yield its streams. Its exit is noticed at once."""
        import anyio
        from mcp import StdioServerParameters, stdio_client

        program, *args = self._settings.command
        found = shutil.which(program)
        if found is None:
            raise ConfigError(
                f"there is no program {program}",
                where=f"{self._field}.command",
                remedy="install it, or correct it",
            )
        if sys.platform == "linux":
            found, args = sys.executable, ["-ISc", END_WITH_PARENT, found, *args]
        env = resolved(self._settings.env, f"{self._field}.env")
        async with (
            stdio_client(StdioServerParameters(command=found, args=args, env=env)) as (read, write),
            anyio.create_task_group() as group,
        ):
            inner, received = anyio.create_memory_object_stream[Any]()

            async def pass_on() -> None:
                async with inner:
                    async for message in read:
                        await inner.send(message)
                    self.ended = True

            group.start_soon(pass_on)
            yield received, write
            group.cancel_scope.cancel()

    @contextlib.asynccontextmanager
    async def _requests(self) -> AsyncIterator[Any]:
        """Connect to a running server by HTTP and yield the streams."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = resolved(self._settings.headers, f"{self._field}.headers")
        own = httpx2.URL(self._settings.url or "")

        async def stay(request: httpx2.Request) -> None:
            # httpx keeps all headers but Authorization on a redirect, so secrets would reach another host
            if _origin(request.url) != _origin(own):
                raise ToolError(f"it redirects to another address, {request.url.scheme}://{request.url.host}")

        hooks = {"request": [stay]}
        timeout = httpx2.Timeout(START_TIMEOUT_S, read=READ_TIMEOUT_S)
        async with (
            httpx2.AsyncClient(
                headers=headers, timeout=timeout, follow_redirects=True, event_hooks=hooks
            ) as client,
            streamable_http_client(self._settings.url or "", http_client=client) as streams,
        ):
            yield streams


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def as_text(result: CallToolResult) -> str:
    """A tool's answer as the model sees it: its texts, and the kind of any other content."""
    parts = [item.text if item.type == "text" else f"({item.type})" for item in result.content]
    if not parts and result.structured_content is not None:
        return json_text(result.structured_content)
    return whole("\n".join(parts))


def _schema(tool: Tool) -> dict[str, Any]:
    described_as = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described_as}
