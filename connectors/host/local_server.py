"""A local server, at most one per MILLRACE_HOME: started once on loopback, and found again by later processes.

Owns its process, its record and its log in MILLRACE_HOME, the port, and the header by which its pages load nothing from outside.
Knows nothing of what it serves: that is a module, started as `python -m MODULE FD [SERVES] HOME`. FD is the number of an
inherited listening socket. HOME is the server's MILLRACE_HOME; it identifies the server among all processes if the record is
lost.
"""

import base64
import contextlib
import hmac
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

import psutil
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from millrace.connectors.host.local_files import PRIVATE_FILE, PRIVATE_UMASK, home, locked, write_whole
from millrace.connectors.host.process_identity import is_alive, read_record, send_signal, wait_ended
from millrace.core.errors import MillraceError

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections that may wait for the server
# A killed process may still hold its port for a moment: it counts as dead before its last thread has ended.
PORT_FREED_S = 5.0
POLL_S = 0.1
# the server is on loopback, so a proxy from the environment must not answer for it
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerRecord(TypedDict):
    """The record of a server: its URL, and its process by pid and creation time."""

    url: str
    pid: int
    created: float
    serves: NotRequired[str]  # which store it shows, for a server that can show several


_record = TypeAdapter(ServerRecord)


@dataclass(frozen=True)
class LocalServer:
    """One kind of local server, such as Prefect's."""

    title: str  # in messages, such as "Prefect server"
    file: str  # stem of its record, lock and log in MILLRACE_HOME
    module: str
    path: str  # of its API, below the address of its page
    folder: Path  # its working directory
    environment: Callable[[str], Mapping[str, str]]  # its variables, given the address of its page
    port_taken: str  # the remedy if another program has the only port that it may use

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock by which one process at a time starts or ends the server."""
        with locked(self._path("lock")):
            yield

    def record(self) -> ServerRecord | None:
        """The server's record; None, for no known server, if there is no file or it is not a record.

        Raises MillraceError if the file cannot be read.
        """
        text = read_record(self._path("json"))
        if text is None:
            return None
        try:
            return _record.validate_json(text)
        except ValidationError:
            log.warning("%s is no record of a %s: any such server is ended", self._path("json"), self.title)
            return None

    def alive(self) -> bool:
        """Whether the recorded process lives, and has not been replaced by another one with its pid."""
        record = self.record()
        return record is not None and is_alive(record["pid"], record["created"])

    def running(self, patience_s: float = 0) -> str | None:
        """The URL of the recorded server if its process lives and answers within `patience_s`."""
        deadline = time.monotonic() + patience_s
        while (record := self.record()) and is_alive(record["pid"], record["created"]):
            if self._healthy(record["url"]):
                return record["url"]
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
        return None

    def stop(self) -> bool:
        """Stop it; False if none runs."""
        with self.locked():
            ended = self.end()
            self._path("json").unlink(missing_ok=True)
        return ended

    def end(self) -> bool:
        """End all servers of this kind in this home, also without a record. Returns whether any ran."""
        record = self.record()
        left = {process for process in psutil.process_iter() if self._is_one(process)}
        if record and is_alive(record["pid"], record["created"]):
            left.add(psutil.Process(record["pid"]))
        for process in left:
            send_signal(process, signal.SIGTERM)
        slow = wait_ended(left, 5)
        for process in slow:
            send_signal(process, signal.SIGKILL)
        wait_ended(slow, 5)
        return bool(left)

    def start(self, timeout_s: float, *ports: int, serves: str | None = None) -> str:
        """Start it on the first free port of these and wait until it answers; returns its URL.

        serves: an argument for the module, between FD and HOME.
        If the server is killed meanwhile, it is started again. Call this under `locked`.
        Raises MillraceError with the end of its log if it does not come up.
        """
        deadline = time.monotonic() + timeout_s
        process, url = self._launch(serves, *ports)
        while not self._healthy(url):
            code = process.poll()
            if code is not None and code < 0:
                log.warning("the local %s was killed while it started: starting it again", self.title)
                process, url = self._launch(serves, *ports)
            elif code is not None or time.monotonic() > deadline:
                process.kill()
                tail = "\n".join(self._path("log").read_text(errors="replace").splitlines()[-15:])
                raise MillraceError(
                    f"the {self.title} did not come up. The end of {self._path('log')}:\n{tail}"
                )
            time.sleep(POLL_S)
        return url

    def _launch(self, serves: str | None, *ports: int) -> tuple[subprocess.Popen[bytes], str]:
        """Start the process, and record it before it answers: if this command is ended, the next one finds the server and waits."""
        with self._path("log").open("ab") as out, self._listening(*ports) as listener:
            os.fchmod(out.fileno(), PRIVATE_FILE)
            page = f"http://127.0.0.1:{listener.getsockname()[1]}"
            arguments = [str(listener.fileno()), *([serves] if serves else []), str(home().absolute())]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[listener.fileno()],
                cwd=self.folder,
                env={**os.environ, **self.environment(page)},
                umask=PRIVATE_UMASK,
            )
        url = f"{page}{self.path}"
        record = ServerRecord(url=url, pid=process.pid, created=psutil.Process(process.pid).create_time())
        if serves:
            record["serves"] = serves
        write_whole(self._path("json"), [json.dumps(record).encode()])
        return process, url

    def _healthy(self, url: str) -> bool:
        try:
            with DIRECT.open(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def _is_one(self, process: psutil.Process) -> bool:
        try:
            arguments = process.cmdline()
            return (
                self.module in arguments
                and arguments[-1] == str(home().absolute())
                and process.uids().real == os.getuid()
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def _path(self, kind: str) -> Path:
        return home() / f"{self.file}.{kind}"

    def _listening(self, *ports: int) -> socket.socket:
        deadline = time.monotonic() + PORT_FREED_S
        while (listener := listening(*ports)) is None:
            if time.monotonic() > deadline:
                raise MillraceError(
                    "another program has taken it",
                    where=f"the {self.title}'s port on loopback, {ports[0]}",
                    remedy=self.port_taken,
                )
            time.sleep(POLL_S)
        return listener


def listening(*ports: int) -> socket.socket | None:
    """A socket that listens on the first free port of these on loopback; 0 stands for any port. None if all are taken.

    The server inherits the socket. A port that was only looked up could be taken before the server binds it.
    """
    for port in ports:
        listener = socket.socket()
        # the port of a server that has just died may be used at once
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            continue
        return listener
    return None


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

HEADER = b"content-security-policy"
SOURCES = {
    "default-src": "'self'",
    # the graph of a flow run compiles its shaders with Function()
    "script-src": "'self' 'unsafe-eval'",
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "media-src": "'self' data: blob:",
    "worker-src": "'self' data: blob:",
    # older browsers do not count a websocket of the same server as 'self'
    "connect-src": "'self' data: blob: ws://127.0.0.1:* ws://localhost:*",
    "frame-src": "'self' data: blob:",
    "object-src": "'none'",
    "base-uri": "'self'",
    "form-action": "'self'",
}
POLICY = "; ".join(f"{name} {sources}" for name, sources in SOURCES.items())


class Login:
    """The login of this home's pages, as browsers send it: HTTP basic authentication."""

    MISSING = "the login is in prefect-auth of MILLRACE_HOME"
    CHALLENGE = (b"www-authenticate", b'Basic realm="millrace"')

    def __init__(self, login: str) -> None:
        """login: `user:password`."""
        self._wanted = b"Basic " + base64.b64encode(login.encode())

    def came_with(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request with these headers has it."""
        return hmac.compare_digest(headers.get(b"authorization", b""), self._wanted)


async def answer_text(send: Send, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
    """Answer an HTTP request with a line of text."""
    sent = [(b"content-type", b"text/plain"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": text.encode()})


class OwnAddressesOnly:
    """ASGI middleware that adds the policy to every answer: a web worker's script obeys its own answer's policy, not its page's."""

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, POLICY.encode())]}
            await send(message)

        await self.app(scope, receive, forward)
