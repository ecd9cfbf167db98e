"""A local server whose port is taken when it is to start: for a moment, by its predecessor, and for longer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.connectors.host import local_server
from millrace.connectors.host.local_server import LocalServer, listening
from millrace.connectors.prefect import server as prefect_server
from millrace.core.errors import MillraceError
from tests.support.flow_runs import wait_until

PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    made = LocalServer(
        title="tiny server",
        file="tiny-server",
        module="tests.support.tiny_server",
        path="/api",
        folder=tmp_path,
        environment=lambda _page: {"PYTHONPATH": os.pathsep.join(sys.path)},
        port_taken="start it again",
    )
    yield made
    made.stop()


def taken() -> tuple[socket.socket, int]:
    """A socket that listens, and its port."""
    holder = listening(0)
    assert holder is not None
    return holder, holder.getsockname()[1]


def test_a_server_waits_for_the_port_of_one_that_has_just_died(server: LocalServer) -> None:
    """A killed process is seen to be dead while its threads still hold the port: up to half a second, if they write to a disk."""
    holder, port = taken()
    threading.Timer(1.0, holder.close).start()
    assert server.start(PATIENCE_S, port) == f"http://127.0.0.1:{port}/api"
    assert server.alive()


def test_a_server_is_found_and_kept_where_a_proxy_is_set_that_does_not_reach_it(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it was asked through the proxy, taken for silent, and ended, though other runs used it."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    url = server.start(PATIENCE_S, 0)
    assert server.running() == url


def test_a_port_that_another_program_keeps_is_an_error_with_the_remedy(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "PORT_FREED_S", 0.3)
    holder, port = taken()
    with pytest.raises(MillraceError, match=f"{port}: another program has taken it; start it again"):
        server.start(PATIENCE_S, port)
    holder.close()


async def test_a_prefect_server_that_could_not_be_restarted_is_tried_again(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch over it ended without a word, and with it the run, once Prefect's client gave up."""
    monkeypatch.setattr(prefect_server, "_server", server)
    url = server.start(PATIENCE_S, 0)
    monkeypatch.setenv("PREFECT_API_URL", url)
    record = server.record()
    assert record is not None
    os.kill(record["pid"], signal.SIGKILL)
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    holder = await asyncio.to_thread(server._listening, port)
    monkeypatch.setattr(local_server, "PORT_FREED_S", 0.3)
    watching = asyncio.create_task(prefect_server.keep_server(PATIENCE_S))
    await asyncio.to_thread(wait_until, lambda: "is not restarted yet: the tiny server" in caplog.text)
    holder.close()
    await asyncio.to_thread(wait_until, lambda: server.running(PATIENCE_S) is not None)
    assert not watching.done()
    watching.cancel()
