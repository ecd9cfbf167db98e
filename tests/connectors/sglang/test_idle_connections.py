"""A connection that was idle is not used again when the server may be about to close it."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvicorn

from millrace.connectors.engines.sglang import connection
from millrace.connectors.engines.sglang.connection import Connection

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class ImpatientServer:
    """Answers requests. One that comes over a connection after a pause of `patience_s` finds it closed, and has no answer."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        clock, answered = asyncio.get_running_loop().time, None
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            if answered is not None and clock() - answered > self._patience_s:
                break
            writer.write(ANSWER)
            await writer.drain()
            answered = clock()
        writer.close()


@pytest.mark.parametrize("verb", ["GET", "POST"])
async def test_a_request_after_a_pause_is_not_lost(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEPT_S", 1.0)
    impatient = ImpatientServer(1.5)
    async with await asyncio.start_server(impatient.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = Connection(f"http://127.0.0.1:{port}", "engine-0")
        for pause_s in (0.0, 0.0, 2.0):
            await asyncio.sleep(pause_s)
            assert await client.send(verb, "/flush_cache", None, 5.0) == {}
        assert impatient.connections == 2  # without a pause the same one is used again
        await client.close()


def test_sglangs_server_keeps_idle_connections_for_longer() -> None:
    """SGLang leaves uvicorn's limit as it is (SGLANG_TIMEOUT_KEEP_ALIVE)."""
    its_limit_s = inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default
    assert its_limit_s >= 2 * connection.KEPT_S
