"""All tools of a configuration, functions and MCP servers' tools: their schemas, and calls by name.

Owns that each name is one tool. Knows nothing of connections.
"""

import asyncio
import contextvars
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from millrace.connectors.user_code.mcp_server import McpConnection
from millrace.core.config.rollout import AnyTool, McpTools
from millrace.core.config.rollout import McpServer as Settings
from millrace.core.errors import ConfigError
from millrace.core.sessions.interface import ToolError
from millrace.core.sessions.tools import LoadedTool, NamedCall, caller, load_tools

FIELD = "rollout.session.tools"


def tool_schemas(tools: Sequence[AnyTool]) -> list[dict[str, Any]]:
    """The schemas of all tools, in their order. Connects to MCP servers for their lists, and disconnects.

    Errors: ConfigError if a tool cannot be loaded or listed, or if two tools have the same name.
    """
    servers = _servers(tools)
    # asyncio.run needs a thread without an event loop, and the caller's may have one
    with ThreadPoolExecutor(1) as thread:
        lists = iter(thread.submit(asyncio.run, _listed(servers)).result() if servers else ())
    schemas: dict[str, dict[str, Any]] = {}
    for at, tool in enumerate(tools):
        found = next(lists) if isinstance(tool, McpTools) else [LoadedTool(tool, f"{FIELD}.{at}").schema]
        for schema in found:
            name = schema["function"]["name"]
            if name in schemas:
                raise ConfigError(
                    f"another tool is called {name} too",
                    where=f"{FIELD}.{at}",
                    remedy="give a function another name, or choose among a server's tools by only",
                )
            schemas[name] = schema
    return list(schemas.values())


def server_schemas(settings: Settings, field: str) -> list[dict[str, Any]]:
    """The schemas of one server's tools. Raises ConfigError."""
    with ThreadPoolExecutor(1) as thread:  # as above
        return thread.submit(asyncio.run, _listed([McpConnection(settings, field)])).result()[0]


async def _listed(servers: Sequence[McpConnection]) -> list[list[dict[str, Any]]]:
    try:
        return await asyncio.gather(*(server.schemas() for server in servers))
    finally:
        await asyncio.gather(*(server.close() for server in servers))


def _servers(tools: Sequence[AnyTool]) -> list[McpConnection]:
    return [
        McpConnection(tool.mcp, f"{FIELD}.{at}.mcp")
        for at, tool in enumerate(tools)
        if isinstance(tool, McpTools)
    ]


class _ServerTool:
    """One tool of a server, ready to be called."""

    def __init__(self, server: McpConnection, name: str) -> None:
        self._server, self._name = server, name

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        return await self._server.call(self._name, arguments)


class WorkerTools:
    """The tools in a process that runs rollouts."""

    def __init__(self, tools: Sequence[AnyTool]) -> None:
        loaded = load_tools(tools)
        self._tools: dict[str, NamedCall] = {**loaded}
        self.schemas = [
            tool.schema for tool in loaded.values()
        ]  # of functions, and of the servers connected so far
        self._unlisted = _servers(tools)
        self._listing: asyncio.Task[str] | None = None

    async def connect(self) -> str:
        """Connect to the remaining servers; returns what is wrong with one of them, "" if nothing is."""
        if not self._unlisted:
            return ""
        if self._listing is None or self._listing.done():
            # an empty context, so that no session is blamed for time spent connecting
            loop = asyncio.get_running_loop()
            self._listing = loop.create_task(self._list(), context=contextvars.Context())
        return await asyncio.shield(self._listing)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Make a call. Raises ToolError."""
        if name not in self._tools and (problem := await self.connect()):
            raise ToolError(f"{name} failed: {problem}")
        return await caller(self._tools)(name, arguments)

    async def _list(self) -> str:
        """Add the tools of the servers that answer; returns what is wrong with a server that fails, "" if none does."""
        servers = list(self._unlisted)
        found = await asyncio.gather(*(server.schemas() for server in servers), return_exceptions=True)
        problem = ""
        for server, schemas in zip(servers, found, strict=True):
            if isinstance(schemas, ConfigError):
                problem = str(schemas)
            elif isinstance(schemas, BaseException):
                raise schemas
            else:
                self._unlisted.remove(server)
                self.schemas += schemas
                names = [schema["function"]["name"] for schema in schemas]
                self._tools |= {name: _ServerTool(server, name) for name in names}
        return problem
