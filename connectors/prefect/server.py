"""A local Prefect server for users who have configured none: on loopback, started once, reused afterwards.

Owns the server's process and its record in MILLRACE_HOME. Knows nothing of flows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from millrace.connectors.storage.local import locked
from millrace.core.errors import MillraceError

log = logging.getLogger(__name__)

POLL_S = 1.0
USUAL_PORT = 4200
BACKLOG = 2048  # connections that may wait for the server
LOGGERS = ("millrace",)
CLIENT_SETTINGS = {
    # millrace's log lines are shown and kept with the flow run; of Prefect's, warnings only
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(LOGGERS),
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "DO_NOT_TRACK": "1",
}


def home() -> Path:
    """MILLRACE_HOME, by default ~/.millrace: records and databases of the local servers."""
    path = Path(os.environ.get("MILLRACE_HOME", "~/.millrace")).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def ensure_server(timeout_s: float = 120) -> str:
    """The API URL of the configured Prefect server, or of the local one, which is started if it does not run.

    Call it before prefect is imported: it sets PREFECT_API_URL for this process and its children.
    Raises MillraceError with the end of the server's log if the server does not come up.
    """
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    configured = os.environ.get("PREFECT_API_URL") or _profile_url()
    if configured:
        return configured
    os.environ.setdefault("PREFECT_HOME", str(home() / "prefect"))
    with locked(home() / "prefect-server.lock"):
        url = _running(timeout_s) or _start(timeout_s, USUAL_PORT, 0)
    os.environ["PREFECT_API_URL"] = url
    return url


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
            _start(timeout_s, int(_read_record()["url"].rsplit(":", 1)[1].split("/")[0]))
    return True


def ui_url(api_url: str) -> str:
    """The address of the web page of the server at an API URL."""
    return api_url.removesuffix("/api")


def stop_server() -> bool:
    """Stop the local server; False if none runs."""
    if not _record_path().exists() or not _alive(_read_record()):
        return False
    process = psutil.Process(_read_record()["pid"])
    for child in [*process.children(recursive=True), process]:
        child.terminate()
    _record_path().unlink(missing_ok=True)
    return True


def _profile_url() -> str | None:
    """PREFECT_API_URL of the active Prefect profile, if the user has one. Read without importing prefect."""
    import tomllib

    path = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser() / "profiles.toml"
    if not path.exists():
        return None
    profiles = tomllib.loads(path.read_text())
    active = profiles.get("profiles", {}).get(
        os.environ.get("PREFECT_PROFILE", profiles.get("active", "")), {}
    )
    url: str | None = active.get("PREFECT_API_URL")
    return url


def _in_use() -> bool:
    """Whether this process uses the local server, and not one that its user configured."""
    return _record_path().exists() and _read_record()["url"] == os.environ.get("PREFECT_API_URL")


def _record_path() -> Path:
    return home() / "prefect-server.json"


def _read_record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(_record_path().read_text())
    return record


def _alive(record: dict[str, Any]) -> bool:
    """Whether the recorded process lives, and no other one has its pid."""
    try:
        process = psutil.Process(record["pid"])
        same = abs(process.create_time() - record["created"]) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _running(patience_s: float = 0) -> str | None:
    """The URL of the recorded server if its process lives and answers within `patience_s`."""
    if not _record_path().exists():
        return None
    record, deadline = _read_record(), time.monotonic() + patience_s
    while _alive(record):
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
    with log_file.open("ab") as out, listening(*ports) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "millrace.connectors.prefect.app", str(listener.fileno())],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[listener.fileno()],
            cwd=Path(__file__).parent,  # prefect.toml with the server's settings lies here
        )
    record = {"url": url, "pid": process.pid, "created": psutil.Process(process.pid).create_time()}
    _record_path().write_text(json.dumps(record))
    return process, url
