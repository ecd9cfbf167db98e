"""What starts a server: its command, the port that it answers at, and its environment.

Owns the types that the kinds of engine share. Knows no kind.
"""

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from millrace.connectors.storage.kernel_cache import KernelCache
from millrace.core.config import RunConfig

HTTP_PROXIES = ("HTTP_PROXY", "ALL_PROXY")  # in upper or lower case


@dataclass(frozen=True)
class Node:
    """One of the nodes that an engine spans. The first one's process answers requests."""

    rank: int
    meeting: str  # host:port of the first node, where the processes of all nodes meet


@dataclass(frozen=True)
class EngineStart:
    """What an engine's server is started with."""

    config: RunConfig
    model: str  # a folder
    index: int
    address: str  # of this node
    key: str = field(repr=False)  # that requests must bring
    folder: Path  # for files until the server answers; no other user can read in it
    node: Node | None = None  # None: the engine is on one node


class Launch(NamedTuple):
    """How to start a server process."""

    command: Sequence[str]
    port: Callable[[], int | None]  # None as long as the port is not known
    environment: Mapping[str, str]
    kernels: KernelCache | None = None  # takes what the server compiled, once it answers


LaunchEngine = Callable[[EngineStart], Launch]
"""Says how to start an engine. Raises ConfigError if the configuration asks for what the engine cannot do."""


def free_port(host: str, following: int = 0) -> int:
    """A port on which nothing listens now, nor on so many `following` ones."""
    while True:
        with contextlib.ExitStack() as probes:
            first = probes.enter_context(socket.socket())
            first.bind((host, 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                for more in range(port + 1, port + 1 + following):
                    probes.enter_context(socket.socket()).bind((host, more))
                return port


def without_http_proxy(given: Mapping[str, str]) -> dict[str, str]:
    """The environment without HTTP proxies: a server reaches the run's other servers over plain HTTP, and a proxy cannot.

    The proxy for HTTPS stays, by which the server downloads from elsewhere.
    """
    environment = {name: value for name, value in given.items() if name.upper() not in HTTP_PROXIES}
    for name in ("ALL_PROXY", "all_proxy"):
        if name in given:
            environment.setdefault("HTTPS_PROXY" if name.isupper() else "https_proxy", given[name])
    return environment
