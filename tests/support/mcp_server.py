"""A server of the Model Context Protocol with good tools and every kind of bad one. `http PORT` serves it by HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def whoami() -> str:
    """Say which process this is, and what it knows."""
    return f"{os.getpid()} {os.environ.get('SERVER_SECRET', 'nothing')}"


@server.tool()
def fail() -> str:
    """Raise."""
    raise KeyError("missing")


@server.tool()
async def wait(seconds: float) -> str:
    """Wait for a while."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """End this process."""
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run(transport="streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
