"""A connection to Prefect that its server's death cuts is no error of the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosedError

from millrace.connectors.prefect.run_errors import log_errors_once

KEEPALIVE = logging.getLogger("websockets.client")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    KEEPALIVE.setLevel(logging.NOTSET)


class Cut(ClientConnection):
    """Its server dies just before a ping."""

    async def ping(self, data: str | bytes | None = None) -> asyncio.Future[float]:
        raise ConnectionClosedError(None, None)


async def _keep_alive() -> None:
    async with serve(lambda connection: connection.wait_closed(), "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with connect(f"ws://127.0.0.1:{port}", create_connection=Cut, ping_interval=0.001) as client:
            assert client.keepalive_task is not None
            await client.keepalive_task


def test_a_cut_connection_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(_keep_alive())
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["keepalive ping failed"]
    caplog.clear()
    log_errors_once()
    asyncio.run(_keep_alive())
    assert not [record for record in caplog.records if record.exc_info]
