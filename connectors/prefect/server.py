"""A Prefect server for those who have configured none: on loopback, started once, found again.

Owns the server's process and its record in MILLRACE_HOME; knows nothing of flows.
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

KEEP_S = 1.0
USUAL_PORT = 4200
BACKLOG = 2048  # connections that wait for the server
LOGGERS = ("millrace",)
CLIENT_SETTINGS = {
    # the project's own log lines are shown and kept with the flow run; of Prefect's only warnings
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(LOGGERS),
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "DO_NOT_TRACK": "1",
}


def home() -> Path:
    """MILLRACE_HOME, by default ~/.millrace: servers' records and databases."""
    path = Path(os.environ.get("MILLRACE_HOME", "~/.millrace")).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def ensure_server(timeout_s: float = 120) -> str:
    """The API URL of the configured Prefect server, or of a local one that is started if it does not run yet.

    Must be called before prefect is imported: it sets PREFECT_API_URL for this process and its children.
    Raises MillraceError with the end of the server's log if it does not come up.
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
    """Start the local server again whenever it dies, where it was, for as long as this runs; for a task of its own.

    Prefect's client tries its calls again for half a minute and more. A configured server looks after itself.
    """
    while _record().exists() and _recorded()["url"] == os.environ.get("PREFECT_API_URL"):
        if not _alive(_recorded()):
            log.warning("the local Prefect server died: starting it again")
            await asyncio.to_thread(_restart, timeout_s)
        await asyncio.sleep(KEEP_S)


def ui_url(api_url: str) -> str:
    """The page that belongs to an API URL."""
    return api_url.removesuffix("/api")


def stop_server() -> bool:
    """Stop the local server that millrace started; False if none runs."""
    if not _record().exists() or not _alive(_recorded()):
        return False
    process = psutil.Process(_recorded()["pid"])
    for child in [*process.children(recursive=True), process]:
        child.terminate()
    _record().unlink(missing_ok=True)
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


def _record() -> Path:
    return home() / "prefect-server.json"


def _recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_record().read_text())
    return found


def _alive(record: dict[str, Any]) -> bool:
    """Whether the very process that was started lives."""
    try:
        process = psutil.Process(record["pid"])
        same = abs(process.create_time() - record["created"]) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _running(patience_s: float = 0) -> str | None:
    """The URL of the server in the record, if that very process lives and answers; a busy one is given some time."""
    if not _record().exists():
        return None
    record, deadline = _recorded(), time.monotonic() + patience_s
    while _alive(record):
        if _healthy(record["url"]):
            return str(record["url"])
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
    return None


def _restart(timeout_s: float) -> None:
    """Start the server on the port it had, unless somebody else has done so."""
    with locked(home() / "prefect-server.lock"):
        if not _alive(_recorded()):
            _start(timeout_s, int(_recorded()["url"].rsplit(":", 1)[1].split("/")[0]))


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def listening(*ports: int) -> socket.socket:
    """A socket that listens on the first of these ports of loopback that nobody has; 0 stands for any.

    The server is handed the socket: a port that is only looked up could be another's by the time it serves.
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
        f"the Prefect server's port on loopback, {ports[0]}, is another program's now: start the command again, it takes another"
    )


def _start(timeout_s: float, *ports: int) -> str:
    log = home() / "prefect-server.log"
    with log.open("ab") as out, listening(*ports) as listener:
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
    deadline = time.monotonic() + timeout_s
    while not _healthy(url):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise MillraceError(f"the Prefect server did not come up; the end of {log}:\n{tail}")
        time.sleep(0.1)
    record = {"url": url, "pid": process.pid, "created": psutil.Process(process.pid).create_time()}
    _record().write_text(json.dumps(record))
    return url
