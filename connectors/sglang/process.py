"""One engine's server process: the class that becomes a Ray actor and dies with its server.

Owns starting, watching and ending the process and its log; knows nothing of weights or requests.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from connectors.sglang.launch import embedded_command, engine_kind, sglang_command, sglang_environment
from core.config import RunConfig
from core.errors import EngineError

PR_SET_PDEATHSIG = 1


class EngineServer:
    """Holds one engine's server process."""

    def __init__(self, config: dict[str, Any], index: int, count: int) -> None:
        self.config = RunConfig.model_validate(config)
        self.index = index
        self.log = Path(tempfile.gettempdir()) / f"millrace-{self.config.run.name}-engine-{index}.log"
        self.starts = 0
        self._released: list[str] = []  # what of the server's GPU memory is given back
        self._process: subprocess.Popen[bytes] | None = None
        self._url: str | None = None

    def state(self) -> dict[str, Any]:
        """Whether the process lives and has answered, and where."""
        process = self._process
        alive = process is not None and process.poll() is None and self._url is not None
        return {
            "index": self.index,
            "alive": alive,
            "url": self._url if alive else None,
            "pid": process.pid if process and alive else None,
            "starts": self.starts,
            "log": str(self.log),
            "released": list(self._released),
        }

    def note_released(self, tags: list[str]) -> None:
        """Remember what memory the server has given back: a driver that comes later must take it again."""
        self._released = list(tags)

    def start(self, model: str) -> dict[str, Any]:
        """Start the server on a model folder unless it lives; returns `state` once it answers.

        Raises EngineError with the end of its log if it dies or stays silent for engines.start_timeout_s.
        """
        if self.state()["alive"]:
            return self.state()
        self.starts += 1
        self._released = []
        port_file = Path(tempfile.mkdtemp(prefix="millrace-engine-")) / "port"
        kind = engine_kind(self.config, _gpus())
        host = self.config.engines.host
        reach = os.environ.get("RAY_NODE_IP_ADDRESS", "127.0.0.1") if host in ("0.0.0.0", "::") else host
        if kind == "embedded":
            command, port = embedded_command(self.config, model, port_file), 0
            environment = None
        else:
            port = _free_port(host)
            command = sglang_command(self.config, model, port, self.index)
            environment = sglang_environment(os.environ)
        with self.log.open("ab") as out:
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
            if not port and port_file.exists():
                port = int(port_file.read_text())
            if port and _answers(f"http://{reach}:{port}/health"):
                self._url = f"http://{reach}:{port}"
                return self.state()
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                self.stop()
                what = (
                    f"ended with {code}" if code is not None else "did not answer in engines.start_timeout_s"
                )
                raise EngineError(
                    f"engine {self.index} ({kind}) {what}; the end of {self.log}:\n{self._tail()}"
                )
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

    def shutdown(self) -> None:
        """What every live part is asked before its actor ends."""
        self.stop()

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def _die_with_parent() -> None:
    """In the child: die when the actor dies. The thread that forks must outlive the server, as actor threads do."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _gpus() -> int:
    """GPUs this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return (
        len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        if Path("/proc/driver/nvidia/gpus").is_dir()
        else 0
    )
