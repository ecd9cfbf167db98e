"""A local Prefect server for users who have configured none: on loopback, started once, reused afterwards.

Owns the server's process and its record in MILLRACE_HOME. Knows nothing of flows.
"""

from __future__ import annotations

import asyncio
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
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from millrace.connectors.storage.exclusive.recorded_processes import is_alive, read_record, send_signal
from millrace.connectors.storage.local import (
    PRIVATE_FILE,
    PRIVATE_UMASK,
    home,
    locked,
    secret_file,
    write_whole,
)
from millrace.core.errors import ConfigError, MillraceError

log = logging.getLogger(__name__)

POLL_S = 1.0
USUAL_PORT = 4200
BACKLOG = 2048  # connections that may wait for the server
AUTH = "PREFECT_API_AUTH_STRING"
LOGGERS = ("millrace",)
APP = "millrace.connectors.prefect.app"
CLIENT_SETTINGS = {
    # millrace's log lines are shown and kept with the flow run; of Prefect's, warnings only
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(LOGGERS),
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "DO_NOT_TRACK": "1",
}

KEPT = "MILLRACE_PREFECT_ITERATIONS"
USUALLY_KEPT = 200  # iterations of a run, each some 200 KiB


class ServerRecord(TypedDict):
    """The local server as prefect-server.json knows it: its process by pid and when that was created."""

    url: str
    pid: int
    created: float


_record = TypeAdapter(ServerRecord)


def login_file() -> Path:
    """The file with what the local server asks for: Prefect's PREFECT_API_AUTH_STRING, `user:password`."""
    return secret_file("prefect-auth", "millrace:")


def ensure_server(timeout_s: float = 120) -> str:
    """The API URL of the configured Prefect server, or of the local one, which is started if it does not run.

    Call it before prefect is imported: it sets PREFECT_API_URL, and what the local server asks for, for this process and
    its children.
    Raises MillraceError with the end of the server's log if the server does not come up.
    """
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    configured = os.environ.get("PREFECT_API_URL") or _profile_url()
    if configured:
        if _in_use():
            os.environ.setdefault(AUTH, login_file().read_text())
        return configured
    os.environ.setdefault("PREFECT_HOME", str(home() / "prefect"))
    with locked(home() / "prefect-server.lock"):
        url = _running(timeout_s)
        if url is None:
            _end_servers()  # one that does not answer, or whose record is lost, must not write to the same database
            url = _start(timeout_s, USUAL_PORT, 0)
    os.environ |= {"PREFECT_API_URL": url, AUTH: login_file().read_text()}
    return url


def kept_iterations() -> int:
    """How many finished iterations of a run stay in the local server's database; 0 stands for all.

    Raises ConfigError if MILLRACE_PREFECT_ITERATIONS is no such number.
    """
    text = os.environ.get(KEPT, str(USUALLY_KEPT))
    if not text.isdecimal() or len(text) > 18:
        raise ConfigError(
            "not a whole number", where=f"{KEPT}={text:.20}", remedy="give one, or 0 to keep all"
        )
    return int(text)


async def keep_server(timeout_s: float = 120) -> None:
    """Restart the local server on its port whenever it dies; runs until cancelled.

    Prefect's client retries its calls for more than half a minute. A server that the user configured is left alone.
    """
    while _in_use():
        await asyncio.to_thread(restart_dead_server, timeout_s)
        await asyncio.sleep(POLL_S)


def restart_dead_server(timeout_s: float = 120) -> bool:
    """Start the local server that this process uses again, on its port, if it died; whether it had died.

    Raises MillraceError with the end of the server's log if the server does not come up.
    """
    if not _in_use() or _alive(_read_record()):
        return False
    log.warning("the local Prefect server died: restarting it")
    with locked(home() / "prefect-server.lock"):
        if not _alive(_read_record()):  # no other process has restarted it meanwhile
            _start(timeout_s, int(os.environ["PREFECT_API_URL"].rsplit(":", 1)[1].split("/")[0]))
    return True


def ui_url(api_url: str) -> str:
    """The address of the web page of the server at an API URL."""
    return api_url.removesuffix("/api")


def local_login() -> Path | None:
    """`login_file` if this process uses the local server, None if it uses one that the user configured."""
    return login_file() if _in_use() else None


def login_hint() -> str:
    """How to log in on the page of the local server; nothing for a server that the user configured."""
    return f" (its page asks for the text in {login_file()})" if local_login() else ""


def stop_server() -> bool:
    """Stop the local server; False if none runs."""
    with locked(home() / "prefect-server.lock"):
        ended = _end_servers()
        _record_path().unlink(missing_ok=True)
    return ended


def _profile_url() -> str | None:
    """PREFECT_API_URL of the active Prefect profile, if the user has one. Read without importing prefect."""
    import tomllib

    path = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser() / "profiles.toml"
    if not path.exists():
        return None
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MillraceError(
            f"cannot be read: {error}", where=str(path), remedy="correct it, or move it away"
        ) from error
    active = profiles.get("profiles", {}).get(
        os.environ.get("PREFECT_PROFILE", profiles.get("active", "")), {}
    )
    url: str | None = active.get("PREFECT_API_URL")
    return url


def _in_use() -> bool:
    """Whether this process uses the local server, and not one that its user configured."""
    record = _read_record()
    return record is not None and record["url"] == os.environ.get("PREFECT_API_URL")


def _record_path() -> Path:
    return home() / "prefect-server.json"


def _read_record() -> ServerRecord | None:
    """The record of the local server; None if there is none, or it holds something else: then no server is known.

    Raises MillraceError if the file cannot be read.
    """
    text = read_record(_record_path())
    if text is None:
        return None
    try:
        return _record.validate_json(text)
    except ValidationError:
        log.warning("%s is no record of a Prefect server: what it was about is ended", _record_path())
        return None


def _end_servers() -> bool:
    """End every local server of this home, also one whose record is lost; whether any ran."""
    record = _read_record()
    left = {process for process in psutil.process_iter() if _is_server(process)}
    if record and _alive(record):
        left.add(psutil.Process(record["pid"]))
    for process in left:
        send_signal(process, signal.SIGTERM)
    _, slow = psutil.wait_procs(left, timeout=5)
    for process in slow:
        send_signal(process, signal.SIGKILL)
    psutil.wait_procs(slow, timeout=5)
    return bool(left)


def _is_server(process: psutil.Process) -> bool:
    try:
        arguments = process.cmdline()
        return (
            APP in arguments
            and arguments[-1] == str(home().absolute())
            and process.uids().real == os.getuid()
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _alive(record: ServerRecord | None) -> bool:
    """Whether the recorded process lives, and no other one has its pid."""
    return record is not None and is_alive(record["pid"], record["created"])


def _running(patience_s: float = 0) -> str | None:
    """The URL of the recorded server if its process lives and answers within `patience_s`."""
    record, deadline = _read_record(), time.monotonic() + patience_s
    while record and _alive(record):
        if _healthy(record["url"]):
            return str(record["url"])
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
    return None


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def listening(*ports: int) -> socket.socket:
    """A socket that listens on the first free one of these loopback ports; 0 stands for any port.

    The server inherits the socket. A port that was only looked up could be taken before the server binds it.
    """
    for port in ports:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from a server that has just died
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            continue
        return listener
    raise MillraceError(
        "another program has taken it",
        where=f"the Prefect server's port on loopback, {ports[0]}",
        remedy="start the command again: it takes another port",
    )


def _start(timeout_s: float, *ports: int) -> str:
    """Start the server on the first free one of these ports and wait until it answers; returns its URL.

    One that is killed meanwhile is started again.
    """
    log_file, deadline = home() / "prefect-server.log", time.monotonic() + timeout_s
    process, url = _launch(log_file, *ports)
    while not _healthy(url):
        code = process.poll()
        if code is not None and code < 0:
            log.warning("the local Prefect server was killed while it started: starting it again")
            process, url = _launch(log_file, *ports)
        elif code is not None or time.monotonic() > deadline:
            process.kill()
            tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-15:])
            raise MillraceError(f"the Prefect server did not come up. The end of {log_file}:\n{tail}")
        time.sleep(0.1)
    return url


def _launch(log_file: Path, *ports: int) -> tuple[subprocess.Popen[bytes], str]:
    """Start the process, and record it before it answers: a command that comes after one that was ended waits for it."""
    kept_iterations()  # an error of it belongs to this process, not into the server's log
    with log_file.open("ab") as out, listening(*ports) as listener:
        os.fchmod(out.fileno(), PRIVATE_FILE)
        page = f"http://127.0.0.1:{listener.getsockname()[1]}"
        secret = login_file().read_text()
        doors = {
            "PREFECT_SERVER_API_AUTH_STRING": secret,
            AUTH: secret,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": page,
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", APP, str(listener.fileno()), str(home().absolute())],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[listener.fileno()],
            cwd=Path(__file__).parent,  # prefect.toml with the server's settings lies here
            env={**os.environ, **doors},
            umask=PRIVATE_UMASK,
        )
    url = f"{page}/api"
    record = ServerRecord(url=url, pid=process.pid, created=psutil.Process(process.pid).create_time())
    write_whole(_record_path(), [json.dumps(record).encode()])
    return process, url
