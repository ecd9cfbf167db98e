"""A Ray cluster of several nodes on this host, each with an address of its own on loopback, ended by process.

Ray's servers listen on every interface once a node has another address than 127.0.0.1, so the cluster asks for a token.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray._private.authentication_test_utils import reset_auth_token_state

from millrace.connectors.host.process_identity import wait_ended
from millrace.connectors.ray.cluster import ADDRESS_FILE
from tests.support.flow_runs import Patience

PATIENCE_S = 120
STARTED = "Ray runtime started"
TOO_SLOW = "timed out during startup"  # Ray gives a node 30 s, which no setting changes
STARTS = 5  # of a node on a machine that is busy
FAST = {  # a dead node is noticed in some 3 s instead of 15
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
LONG = {
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "600"
}  # the machine may be busy while a client server starts


class Node:
    """One node: the `ray start` that holds its processes."""

    def __init__(self, address: str, start: Callable[[], subprocess.Popen[bytes]], log: Path) -> None:
        self.address = address
        self._start = start
        self._process = start()
        self._log = log

    def wait(self) -> Node:
        """Until the node has joined. One that was too slow for Ray is started again."""
        patience, starts = Patience(PATIENCE_S), 1
        while STARTED not in self._log.read_text():
            text = self._log.read_text()
            assert patience.left, text
            if self._process.poll() is not None:
                assert TOO_SLOW in text, text
                assert starts < STARTS, text
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # what it had started
                self._process, starts = self._start(), starts + 1
            time.sleep(0.05)
        return self

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process that all others of the node are below."""
        return self._process.pid

    def actors(self) -> set[int]:
        """Processes of millrace's actors on it."""
        return {p.pid for p in self._processes() if _command(p).startswith("ray::Host")}

    def shards(self) -> set[str]:
        """Which kinds of shards work on it."""
        titles = [_command(process) for process in self._processes()]
        return {kind for kind in ("rollout_shard", "reward_shard") if any(kind in title for title in titles)}

    def kill_client_servers(self) -> int:
        """`kill -9` of what serves drivers outside the cluster, one each; the head and its door to new ones live. How many."""
        found = [p for p in self._processes() if "--mode=specific-server" in _arguments(p)]
        for process in found:
            process.send_signal(signal.SIGKILL)
        wait_ended(found, 20)
        return len(found)

    def kill(self) -> None:
        """`kill -9` of everything on the node."""
        everything = self._processes()
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._process.wait()
        wait_ended(everything, 20)

    def _processes(self) -> list[psutil.Process]:
        if not self.alive:
            return []  # another process may have its number by now
        try:
            node = psutil.Process(self._process.pid)
            return [node, *node.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _command(process: psutil.Process) -> str:
    return (_arguments(process) or [""])[0]


class RayNodes:
    """The cluster: a head and what was added to it. `environment` is what drivers need to join."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))  # sockets allow no long path
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        self.nodes: list[Node] = []
        self._port = 0  # of the head, once it was started: another one after it has the same
        self.client_address = ""  # of the head, for drivers outside the cluster; as lasting

    def add(self, cpus: int, gpus: int = 0, **environment: str) -> Node:
        """Start the head, or one more node once the head runs; does not wait for it."""
        number = len(self.nodes)
        address = f"127.0.0.{2 + number}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        command += ["--no-monitor", "--include-log-monitor=false"]  # no driver asks for what they do
        if number:
            command += [f"--address={self.address}"]
        else:
            self._port = self._port or _free_port(address)
            command += ["--head", f"--port={self._port}", "--include-dashboard=false"]
            self.client_address = self.client_address or f"ray://{address}:{_free_port(address)}"
            port = self.client_address.rpartition(":")[2]
            command += [f"--temp-dir={self.folder}", f"--ray-client-server-port={port}"]
        quiet = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
        log = self.folder / f"node-{number}.log"

        def start() -> subprocess.Popen[bytes]:
            with log.open("wb") as out:
                return subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **FAST, **LONG, **quiet, **self.environment, **environment},
                    start_new_session=True,
                )

        node = Node(address, start, log)
        self.nodes.append(node)
        return node

    @property
    def address(self) -> str:
        """The head's, which Ray notes a moment after it says that it runs."""
        file, patience = self.folder / ADDRESS_FILE, Patience(PATIENCE_S)
        while not (file.exists() and file.read_text()):
            assert patience.left, self.nodes[0].wait()
            time.sleep(0.05)
        return file.read_text()

    def kill(self) -> None:
        """`kill -9` of everything on all nodes, after which a head can be added again: a cluster that knows nothing."""
        for node in reversed(self.nodes):
            node.kill()
        self.nodes.clear()
        (self.folder / ADDRESS_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """End all nodes."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def ray_nodes(cpus: int, gpus: int = 0) -> Iterator[RayNodes]:
    """A head and a second node alike."""
    cluster = RayNodes()
    try:
        cluster.add(cpus, gpus).wait()
        cluster.add(cpus, gpus).wait()
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def token_of(cluster: RayNodes) -> Iterator[None]:
    """This process may join the cluster meanwhile: Ray reads the environment when it is imported, and here again."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in cluster.environment.items():
            environment.setenv(name, value)
        reset_auth_token_state()
        yield
    reset_auth_token_state()


def _free_port(address: str) -> int:
    """A port below those that the system gives out, so that none of this host's processes takes it by chance."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise AssertionError(f"no port of {address} is free")
