"""What is said where a client server answers, but cannot begin."""

from __future__ import annotations

import pytest

from millrace.connectors.ray import client
from millrace.core.errors import ActorLostError

ADDRESS = "ray://127.0.0.1:10001"
RAISED = """Initialization failure from server:
Traceback (most recent call last):
  File "proxier.py", line 761, in Datapath
RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err for detailed logs.
"""  # as Ray's client raises it


def test_a_client_server_that_cannot_begin_is_named_with_what_it_raised() -> None:
    """Once the first line alone was told, which names nothing."""
    with pytest.raises(ActorLostError) as raised, client.joining(ADDRESS):
        raise ConnectionAbortedError(RAISED)
    assert str(raised.value) == (
        f"placement.ray_address = {ADDRESS}: Ray's client server cannot begin a connection: RuntimeError: Starting Ray client "
        "server failed. See ray_client_server_23000.err for detailed logs.; correct what its logs on the head name "
        "(ray_client_server*), and start the same command again"
    )


def test_what_a_node_raises_while_it_joins_stays_what_it_is() -> None:
    with pytest.raises(ConnectionAbortedError), client.joining("10.0.0.1:6379"):
        raise ConnectionAbortedError(RAISED)
