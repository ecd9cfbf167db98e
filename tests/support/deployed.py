"""Prefect's commands and API at a server, and a worker: what a user of the deployments has."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from millrace.connectors.host.process_identity import wait_ended
from tests.support.flow_runs import PATIENCE_S, basic, output_of, wait_until

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Deployed:
    """A Prefect server's commands, run in a folder by an interpreter of its own, and a worker on the pool `local`."""

    def __init__(
        self, api: str, login: str, environment: Mapping[str, str], folder: Path, python: str = sys.executable
    ) -> None:
        self.api = api
        self.folder = folder
        self.environment = {**environment, "PREFECT_API_URL": api, "PREFECT_WORKER_QUERY_SECONDS": "1"}
        self.environment["PREFECT_API_AUTH_STRING"] = login
        self._headers = {"Content-Type": "application/json", **basic(login)}
        self.environment["PWD"] = str(folder)
        self._command = [python, "-P", "-m", "prefect", "--no-prompt"]
        self._millrace = [python, "-P", "-m", "millrace.flows.commands"]
        self.worker: psutil.Process | None = None

    def prefect(self, *arguments: str) -> str:
        """Run a prefect command to its end and return what it printed."""
        return self._call(*self._command, *arguments)

    def millrace(self, *arguments: str) -> str:
        """Run a millrace command to its end and return what it printed."""
        return self._call(*self._millrace, *arguments)

    def _call(self, *words: str) -> str:
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        out = output_of(process)
        assert process.returncode == 0, out
        return out

    def start_worker(self, log: Path) -> None:
        """Start a worker that prints to a file."""
        process = subprocess.Popen(
            [*self._command, "worker", "start", "--pool", "local"],
            cwd=self.folder,
            env=self.environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.worker = psutil.Process(process.pid)

    def close(self) -> None:
        """End the worker, and what it runs."""
        assert self.worker is not None
        flows = self.worker.children()
        self.kill_worker()
        for process in flows:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_worker(self) -> None:
        """End the worker; asked politely it may wait for its last run's process for minutes."""
        assert self.worker is not None
        if self.worker.is_running():  # its number is not another's by now
            os.killpg(self.worker.pid, signal.SIGKILL)
        wait_ended([self.worker], 20)

    def ask(self, path: str, body: object = None, method: str | None = None) -> Any:
        """One request to the server's API: with a body a POST, unless said otherwise."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.api}{path}", data, self._headers, method=method)
        with urlopen(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def start(self, config: dict[str, Any]) -> str:
        """Id of a new flow run of the deployment train/train."""
        return self.start_deployment("train/train", {"config": config})

    def start_deployment(self, name: str, parameters: dict[str, Any], **environment: str) -> str:
        """Id of a new flow run of a deployment. environment: of its process, besides that of the deployment."""
        deployment = self.ask(f"/deployments/name/{name}")["id"]
        asked = {"parameters": parameters, "job_variables": {"env": environment}}
        run = self.ask(f"/deployments/{deployment}/create_flow_run", asked)
        return str(run["id"])

    def state(self, flow_run: str) -> str:
        """Type of a flow run's state."""
        return str(self.ask(f"/flow_runs/{flow_run}")["state_type"])

    def wait(self, flow_run: str) -> str:
        """The state in which a flow run ended."""
        self.wait_until(lambda: self.state(flow_run) in ENDED)
        return self.state(flow_run)

    def wait_until(self, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Poll until something holds that the server is asked for: not as often as it can answer."""
        wait_until(holds, patience_s, pause_s=0.3)


def flow_process(server: Deployed) -> psutil.Process:
    """The one process that the worker runs a flow in."""
    assert server.worker is not None
    (found,) = server.worker.children()
    return found
