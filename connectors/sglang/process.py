"""The server process of one engine, or of the router: classes that become Ray actors, whose servers die with them.

Owns starting, watching and ending the process, its log and what is copied to its node; knows nothing of requests.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from millrace.connectors.sglang.launch import (
    ENGINE_KEY,
    embedded_command,
    engine_kind,
    router_command,
    sglang_command,
    sglang_environment,
    write_sglang_keys,
)
from millrace.connectors.sglang.router_process import KEY as ROUTER_KEY
from millrace.connectors.storage.local import PRIVATE_FILE, PRIVATE_FOLDER, log_folder
from millrace.connectors.storage.own_folders import own_folder, remove_own_folder, temporary_folder
from millrace.connectors.storage.store import split_url
from millrace.core.config import RunConfig
from millrace.core.config.plan import visible_gpus
from millrace.core.contracts.handles import ServerState
from millrace.core.errors import EngineError

PR_SET_PDEATHSIG = 1


class _ServerHolder:
    """Holds one server process."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config = RunConfig.model_validate(config)
        self.log = log_folder(self.config.storage.root, self.config.run.name) / f"{name}.log"
        # of this run alone: in an actor its namespace is the run's identity
        self._identity = os.environ.get("MILLRACE_RUN", self.config.run.name)
        self.starts = 0
        host = self.config.engines.host
        everywhere = host in ("0.0.0.0", "::")
        self.address = os.environ.get("RAY_NODE_IP_ADDRESS", "127.0.0.1") if everywhere else host
        self._process: subprocess.Popen[bytes] | None = None
        self._url: str | None = None
        self._key = secrets.token_hex(32)  # hexadecimal: no value that a command line takes for an option

    def state(self) -> ServerState:
        """Whether the process lives and has answered, and where."""
        process = self._process
        alive = process is not None and process.poll() is None and self._url is not None
        return {
            "alive": alive,
            "url": self._url if alive else None,
            "key": self._key if alive else None,
            "pid": process.pid if process and alive else None,
            "starts": self.starts,
            "log": str(self.log),
        }

    def _run(
        self,
        what: str,
        command: Sequence[str],
        port: Callable[[], int | None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the server and wait until it answers at its port, which may be known only later.

        Raises EngineError with the end of its log if it dies or stays silent for engines.start_timeout_s.
        """
        self.starts += 1
        self.log.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            os.fchmod(out.fileno(), PRIVATE_FILE)  # SGLang writes its arguments there, and the key is one
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + self.config.engines.start_timeout_s
        while True:
            known = port()
            if known and _answers(f"http://{self.address}:{known}/health"):
                self._url = f"http://{self.address}:{known}"
                return
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                self.stop()
                how = (
                    f"ended with {code}" if code is not None else "did not answer in engines.start_timeout_s"
                )
                raise EngineError(f"{what} {how}; the end of {self.log}:\n{self._tail()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End the server."""
        process = self._process
        if process and process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._process = self._url = None

    def kill(self) -> None:
        """End the server at once, whatever it does."""
        if self._process:
            self._process.kill()
            self._process.wait()
        self._process = self._url = None

    def _tail(self) -> str:
        text = self.log.read_text(errors="replace").replace(self._key, "(its key)")
        return "\n".join(text.splitlines()[-15:])


class EngineServer(_ServerHolder):
    """Holds one engine's server process."""

    def __init__(self, config: dict[str, Any], index: int, count: int) -> None:
        super().__init__(config, f"engine-{index}")
        self.index = index
        self._released: list[str] = []  # tags of GPU memory that the server has given back
        self._download: str | None = None  # this node's copy of a folder in storage

    def state(self) -> ServerState:
        """Whether the process lives, where it answers, and what memory it has given back."""
        return {**super().state(), "index": self.index, "released": list(self._released)}

    def note_released(self, tags: list[str]) -> None:
        """Remember which memory the server has given back: a driver that comes later must take it again."""
        self._released = list(tags)

    def start(self, model: str) -> ServerState:
        """Start the server on a model folder unless it lives; returns `state` once it answers."""
        if self.state()["alive"]:
            return self.state()
        self._released = []
        kind = engine_kind(self.config, visible_gpus())
        what = f"engine {self.index} ({kind})"
        with temporary_folder("millrace-engine") as folder:  # nobody else can read in it
            if kind == "embedded":
                port_file = Path(folder) / "port"
                command = embedded_command(self.config, model, port_file)
                environment = {**os.environ, ENGINE_KEY: self._key}
                self._run(what, command, partial(_number_in, port_file), environment)
            else:
                port, bootstrap = _free_port(self.config.engines.host), _free_port(self.config.engines.host)
                keys = write_sglang_keys(Path(folder), self._key)
                command = sglang_command(self.config, model, port, self.index, bootstrap, keys)
                patience = self.config.rollout.progress_timeout_s
                self._run(what, command, lambda: port, sglang_environment(os.environ, self.address, patience))
        return self.state()

    def download(self, url: str) -> str:
        """Copy a folder from storage to this node, where it stays until `remove_download`; returns its path."""
        self.remove_download()
        store, name = split_url(url)
        self._download = own_folder(f"millrace-{self._identity}-engine-{self.index}")
        store.download_dir(name, self._download)
        return self._download

    def remove_download(self) -> None:
        """Remove what was downloaded."""
        if self._download:
            remove_own_folder(self._download)
        self._download = None


class RouterServer(_ServerHolder):
    """Holds the run's sglang-router process."""

    def __init__(self, config: dict[str, Any], index: int, count: int) -> None:
        super().__init__(config, "router")

    def start(self) -> ServerState:
        """Start the router, which knows no engine yet, unless it lives; returns `state` once it answers."""
        if not self.state()["alive"]:
            port, metrics = _free_port(self.config.engines.host), _free_port("127.0.0.1")
            environment = {**os.environ, ROUTER_KEY: self._key}
            command = router_command(self.config, port, metrics)
            self._run("sglang-router", command, lambda: port, environment)
        return self.state()


def _die_with_parent() -> None:
    """In the child: die when the actor dies. The thread that forks must outlive the server, as actor threads do."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _number_in(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
