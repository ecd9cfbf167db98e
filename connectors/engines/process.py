"""The server process of one engine or of the router, held by a Ray actor. The server dies with its actor.

Owns starting, watching and ending the process, its log, and the files copied to its node; knows nothing of requests.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from millrace.connectors.engines.kinds import LAUNCH
from millrace.connectors.engines.launch import EngineStart, Launch, Node, free_port, without_http_proxy
from millrace.connectors.engines.sglang.launch import router_command
from millrace.connectors.engines.sglang.router_process import KEY as ROUTER_KEY
from millrace.connectors.host.local_files import PRIVATE_FILE, PRIVATE_FOLDER, log_folder
from millrace.connectors.host.own_folders import own_folder, remove_own_folder, temporary_folder
from millrace.connectors.storage.kernel_cache import KernelCache
from millrace.connectors.storage.store import split_url
from millrace.core.config import RunConfig
from millrace.core.config.plan import visible_gpus
from millrace.core.contracts.handles import ServerState
from millrace.core.errors import EngineError, EngineLostError, PortTakenError
from millrace.core.waits import beat

PR_SET_PDEATHSIG = 1
PORT_TAKEN = "address already in use"  # in the end of the server's log
PORT_TRIES = 3
PORTS_AFTER_MEETING = 8  # SGLang takes some of them with enable_dp_attention
# the server is on the same node, so a proxy from the environment must not answer for it
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _ServerHolder:
    """Holds one server process."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config = RunConfig.model_validate(config)
        self.log = log_folder(self.config.storage.root, self.config.run.name) / f"{name}.log"
        # different for each run: in an actor MILLRACE_RUN is the namespace, which is the run's identity
        self._identity = os.environ.get("MILLRACE_RUN", self.config.run.name)
        self.starts = 0
        host = self.config.engines.host
        everywhere = host in ("0.0.0.0", "::")
        self.address = os.environ.get("RAY_NODE_IP_ADDRESS", "127.0.0.1") if everywhere else host
        self._process: subprocess.Popen[bytes] | None = None
        self._url: str | None = None
        self._what, self._deadline = "", 0.0  # of the last start
        self._port: Callable[[], int | None] = lambda: None
        self._kernels: KernelCache | None = None
        self._key = secrets.token_hex(32)  # hexadecimal, since a command line must not take it for an option

    def state(self) -> ServerState:
        """Whether the process lives and has answered, and its address."""
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

    def _run(self, what: str, launch: Callable[[], Launch]) -> None:
        """Start the server and wait until it answers at its port, which may become known only later.

        A port may be taken between its choice and the server's binding, and servers choose some ports themselves, so a start that
        fails for a taken port is repeated with other ports. Raises EngineLostError if the server is killed, EngineError with the
        end of its log if it dies for another reason or does not answer within engines.start_timeout_s.
        """
        for left in reversed(range(PORT_TRIES)):
            self._launch(what, launch())
            try:
                while not self._ready():
                    beat()  # this wait has another deadline
                    time.sleep(0.05)
                return
            except PortTakenError:
                if not left:
                    raise

    def _launch(self, what: str, launch: Launch) -> None:
        """Start the server, without a wait."""
        self.starts += 1
        self._what, self._port, self._kernels = what, launch.port, launch.kernels
        self.log.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            os.fchmod(out.fileno(), PRIVATE_FILE)  # SGLang logs its arguments, and with them the key
            self._process = subprocess.Popen(
                launch.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=without_http_proxy(launch.environment),
                preexec_fn=_die_with_parent,
            )
        self._deadline = time.monotonic() + self.config.engines.start_timeout_s

    def _ready(self) -> bool:
        """Whether the server that was started answers by now. Raises the errors of _run, PortTakenError for a port that was taken."""
        if self._process is None:
            raise EngineLostError(f"{self._what} was ended during its start")
        known = self._port()
        if known and _answers(f"http://{self.address}:{known}/health"):
            self._url = f"http://{self.address}:{known}"
            self._give_kernels()
            return True
        self._check_start()
        return False

    def _give_kernels(self) -> None:
        if self._kernels:
            self._kernels.give_later()

    def _check_start(self) -> None:
        """Raise an error if the server that was started has ended, or takes too long."""
        assert self._process is not None
        code = self._process.poll()
        if code is None and time.monotonic() <= self._deadline:
            return
        self.stop()
        patience = f"did not answer in engines.start_timeout_s = {self.config.engines.start_timeout_s:g}"
        error: type[EngineError] = EngineError
        # SGLang ends by a signal of its own when the port of its ranks is taken
        if code is not None and PORT_TAKEN in self._tail().lower():
            error = PortTakenError
        elif code is not None and code < 0:  # by a signal, so its log has no reason
            error = EngineLostError
        raise error(
            f"{self._what} {patience if code is None else f'ended with {code}'}; the end of {self.log}:\n{self._tail()}",
            remedy="correct what the log names, or raise engines.start_timeout_s if it was still loading, and start "
            "the same command again: what finished is kept",
        )

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
        """Kill the server."""
        if self._process:
            self._process.kill()
            self._process.wait()
        self._process = self._url = None

    def _tail(self) -> str:
        text = self.log.read_text(errors="replace").replace(self._key, "(its key)")
        return "\n".join(text.splitlines()[-15:])


class _EngineHolder(_ServerHolder):
    """Holds a process of an engine: its server, or its process on one of the nodes that it spans."""

    def __init__(self, config: dict[str, Any], name: str, index: int) -> None:
        super().__init__(config, name)
        self.index = index
        self._files = contextlib.ExitStack()  # of a start without a wait

    def _kind(self) -> str:
        return self.config.engines.kind_at(visible_gpus()).name

    def _launch_node(self, model: str, node: Node) -> None:
        self.kill()
        kind = self._kind()
        # no other user can read in it
        folder = self._files.enter_context(temporary_folder("millrace-engine"))
        start = EngineStart(self.config, model, self.index, self.address, self._key, Path(folder), node)
        self._launch(f"engine {self.index} ({kind}), node {node.rank}", LAUNCH[kind](start))

    def stop(self) -> None:
        """End the process."""
        super().stop()
        self._files.close()

    def kill(self) -> None:
        """Kill the process."""
        super().kill()
        self._files.close()


class EngineNode(_EngineHolder):
    """Holds an engine's process on a further one of the nodes that the engine spans. It answers no requests."""

    def __init__(self, config: dict[str, Any], index: int, count: int) -> None:
        """index: counts the further nodes of all engines, engine by engine."""
        nodes = RunConfig.model_validate(config).engines.nodes
        engine, further = divmod(index, nodes - 1)
        self.rank = 1 + further
        super().__init__(config, f"engine-{engine}-node-{self.rank}", engine)

    def state(self) -> ServerState:
        """Whether the process lives. It has no URL."""
        process = self._process
        alive = process is not None and process.poll() is None
        return {**super().state(), "alive": alive, "pid": process.pid if process and alive else None}

    def launch(self, model: str, meeting: str) -> None:
        """Start the process, which meets the engine's first one, without a wait for it. An earlier one is killed."""
        self._launch_node(model, Node(self.rank, meeting))

    def ready(self) -> bool:
        """True as long as the process lives: when the first one answers, all are ready. Raises the errors of EngineServer.ready."""
        if self._process is None:
            raise EngineLostError(f"{self._what} was ended during its start")
        self._check_start()
        self._give_kernels()
        return True


class EngineServer(_EngineHolder):
    """Holds one engine's server process."""

    def __init__(self, config: dict[str, Any], index: int, count: int) -> None:
        super().__init__(config, f"engine-{index}", index)
        self._released: list[str] = []  # tags of GPU memory that the server has released
        self._download: str | None = None  # this node's copy of a folder in storage
        self._trace: str | None = None  # folder that the server writes traces to

    def state(self) -> ServerState:
        """Whether the process lives, its address, and the memory that it has released."""
        return {**super().state(), "index": self.index, "released": list(self._released)}

    def note_released(self, tags: list[str]) -> None:
        """Record which memory the server has released, since a later driver must take it back."""
        self._released = list(tags)

    def start(self, model: str) -> ServerState:
        """Start the server on a model folder unless it lives; returns `state` once the server answers."""
        if self.state()["alive"]:
            return self.state()
        self._released = []
        kind = self._kind()
        with temporary_folder("millrace-engine") as folder:  # no other user can read in it
            start = EngineStart(self.config, model, self.index, self.address, self._key, Path(folder))
            self._run(f"engine {self.index} ({kind})", partial(LAUNCH[kind], start))
        return self.state()

    def meeting(self) -> str:
        """host:port of this node, at which the processes of all nodes that the engine spans can meet."""
        return f"{self.address}:{free_port(self.address, PORTS_AFTER_MEETING)}"

    def launch(self, model: str, meeting: str) -> None:
        """Start the process of the first of the engine's nodes, without a wait for it or the others. An earlier one is killed."""
        self._released = []
        self._launch_node(model, Node(0, meeting))

    def ready(self) -> bool:
        """Whether the engine that was launched answers. Raises the errors of `start`, PortTakenError for a port that was taken."""
        if not self._ready():
            return False
        self._files.close()
        return True

    def download(self, url: str) -> str:
        """Copy a folder from storage to this node and return its path. The copy stays until `remove_download`."""
        self.remove_download()
        store, name = split_url(url)
        self._download = own_folder(f"millrace-{self._identity}-engine-{self.index}")
        store.download_dir(name, self._download)
        return self._download

    def remove_download(self) -> None:
        """Remove the downloaded folder."""
        if self._download:
            remove_own_folder(self._download)
        self._download = None

    def trace_folder(self) -> str:
        """An empty folder on this node, which stays until `store_trace`."""
        self._remove_trace()
        self._trace = own_folder(f"millrace-{self._identity}-trace-{self.index}", tempfile.gettempdir())
        return self._trace

    def store_trace(self, url: str) -> list[str]:
        """Move the folder's files to a folder in storage, each named by the engine; returns their names there."""
        if self._trace is None:
            return []
        for file in sorted(Path(self._trace).iterdir()):
            name = file.name.removeprefix("engine.")  # of an embedded one, which has one file
            file.rename(file.with_name(f"engine-{self.index}.{name}"))
        store, path = split_url(url)
        stored = store.upload_dir(self._trace, path)
        self._remove_trace()
        return [entry.path for entry in stored]

    def _remove_trace(self) -> None:
        if self._trace:
            remove_own_folder(self._trace)
        self._trace = None


class RouterServer(_ServerHolder):
    """Holds the run's sglang-router process."""

    def __init__(self, config: dict[str, Any], index: int, count: int) -> None:
        super().__init__(config, "router")

    def start(self) -> ServerState:
        """Start the router, without engines, unless it lives; returns `state` once it answers."""
        if not self.state()["alive"]:
            self._run("sglang-router", self._command)
        return self.state()

    def _command(self) -> Launch:
        port, metrics = free_port(self.config.engines.host), free_port("127.0.0.1")
        command = router_command(self.config, port, metrics)
        return Launch(command, lambda: port, {**os.environ, ROUTER_KEY: self._key})


def _die_with_parent() -> None:
    """Run in the child: die with the actor. The thread that forks must outlive the server, as actor threads do."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
