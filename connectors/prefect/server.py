"""A local Prefect server for users who have configured none: on loopback, started once, reused afterwards.

Owns which server this process uses, and how it logs in there. Knows nothing of flows.
"""

import asyncio
import logging
import os
import shlex
import socket
from pathlib import Path
from urllib.parse import urlsplit

from millrace.connectors.host.local_files import home, secret_file, whole_number
from millrace.connectors.host.local_server import LocalServer
from millrace.core.contracts.progress import starting
from millrace.core.errors import ConfigError, MillraceError

log = logging.getLogger(__name__)

POLL_S = 1.0
USUAL_PORT = 4200
AUTH = "PREFECT_API_AUTH_STRING"
LINKS = "PREFECT_UI_URL"  # the start of Prefect's links to its pages
LOGGERS = ("millrace",)
CLIENT_SETTINGS = {
    # millrace's log lines are shown and stored with the flow run; Prefect's only from warnings up
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(LOGGERS),
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "DO_NOT_TRACK": "1",
}

KEPT = "MILLRACE_PREFECT_ITERATIONS"
USUALLY_KEPT = 200  # iterations per run, each some 200 KiB


def login_file() -> Path:
    """The file with the local server's login: Prefect's PREFECT_API_AUTH_STRING, `user:password`."""
    return secret_file("prefect-auth", "millrace:")


def ensure_server(timeout_s: float = 120) -> str:
    """The API URL of the configured Prefect server; otherwise of the local one, which is started if it does not run.

    Call it before prefect is imported: it sets PREFECT_API_URL and the local server's login for this process and its
    children.
    Raises MillraceError with the end of the server's log if the server does not come up.
    """
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    configured = os.environ.get("PREFECT_API_URL") or _profile_url()
    if configured:
        _check_is_api(configured)
        if _in_use():
            os.environ.setdefault(AUTH, login_file().read_text())
            os.environ.setdefault(LINKS, _linked_page(configured))
        else:
            _check_answers(configured)
        return configured
    os.environ.setdefault("PREFECT_HOME", str(home() / "prefect"))
    with _server.locked():
        url = _server.running(timeout_s)
        if url is None:
            # a server that does not answer, or whose record is lost, must not write to the same database
            _server.end()
            with starting(log, "the Prefect server"):
                url = _server.start(timeout_s, USUAL_PORT, 0)
    os.environ |= {"PREFECT_API_URL": url, AUTH: login_file().read_text(), LINKS: _linked_page(url)}
    return url


def server_runs() -> bool:
    """Whether the user configured a Prefect server, or the local one runs."""
    return bool(os.environ.get("PREFECT_API_URL") or _profile_url()) or _server.alive()


def kept_iterations() -> int:
    """The number of finished iterations per run that stay in the local server's database; 0 keeps all.

    Raises ConfigError if MILLRACE_PREFECT_ITERATIONS is not such a number.
    """
    return whole_number(KEPT, USUALLY_KEPT)


async def keep_server(timeout_s: float = 120) -> None:
    """Restart the local server on its port whenever it dies, until cancelled.

    A restart that fails is tried again; Prefect's client meanwhile retries its calls for more than half a minute. A server that
    the user configured is left alone.
    """
    while _in_use():
        try:
            await asyncio.to_thread(restart_dead_server, timeout_s)
        except MillraceError as error:
            log.warning("the local Prefect server is not restarted yet: %s", error)
        await asyncio.sleep(POLL_S)


def restart_dead_server(timeout_s: float = 120) -> bool:
    """Restart the local server that this process uses, on the same port, if it died; returns whether it had died.

    Raises MillraceError with the end of the server's log if the server does not come up.
    """
    if not _in_use() or _server.alive():
        return False
    log.warning("the local Prefect server died: restarting it")
    with _server.locked():
        if not _server.alive():  # otherwise another process has restarted it
            _server.start(timeout_s, int(os.environ["PREFECT_API_URL"].rsplit(":", 1)[1].split("/")[0]))
    return True


def ui_url(api_url: str) -> str:
    """The address of the web page that belongs to an API URL."""
    return api_url.removesuffix("/api")


def _linked_page(api_url: str) -> str:
    """The start of links to the local server's pages. The newer page asks for the login first; the older one would answer 404."""
    return f"{ui_url(api_url)}/v2"


def local_login() -> Path | None:
    """`login_file` if this process uses the local server, None if the user configured another."""
    return login_file() if _in_use() else None


def login_hint() -> str:
    """How to log in on the local server's page; "" for a server that the user configured."""
    return f" (its page asks for the text in {login_file()})" if local_login() else ""


def export_line(api_url: str) -> str:
    """A shell line that lets Prefect's commands reach the server. It reads the local server's login from its file."""
    login = local_login()
    secret = f' {LINKS}={_linked_page(api_url)} {AUTH}="$(cat {shlex.quote(str(login))})"' if login else ""
    return f"export PREFECT_API_URL={api_url}{secret}"


def stop_server() -> bool:
    """Stop the local server; False if none runs."""
    return _server.stop()


def _check_is_api(url: str) -> None:
    """Raise ConfigError if the URL is a server's page: it would answer API requests with Not Found."""
    if not urlsplit(url).path.strip("/"):
        raise ConfigError(
            "is the address of a page, not of its API",
            where=f"PREFECT_API_URL={url}",
            remedy=f"export PREFECT_API_URL={url.rstrip('/')}/api",
        )


def _check_answers(url: str) -> None:
    """Raise ConfigError if an address on this host has no listener, such as a server that was stopped."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return
    try:
        socket.create_connection((parts.hostname, parts.port or 80), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"no server is there ({error.strerror or error})",
            where=f"PREFECT_API_URL={url}",
            remedy="unset PREFECT_API_URL, and millrace starts its own server; or start that one",
        ) from error


def _profile_url() -> str | None:
    """PREFECT_API_URL in the user's active Prefect profile, if any. Read without importing prefect."""
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
    """Whether this process uses the local server, not a server that the user configured."""
    record = _server.record()
    return record is not None and record["url"] == os.environ.get("PREFECT_API_URL")


def _environment(page: str) -> dict[str, str]:
    """Environment variables that are added for the server's process."""
    # checked here, so that an error reaches the user and not only the server's log
    kept_iterations()
    secret = login_file().read_text()
    return {
        "PREFECT_SERVER_API_AUTH_STRING": secret,
        AUTH: secret,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": page,
        # otherwise Prefect copies its page beside its own files, where only the first user to start a server can write
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home().absolute() / "prefect-page"),
    }


_server = LocalServer(
    title="Prefect server",
    file="prefect-server",
    module="millrace.connectors.prefect.app",
    path="/api",
    folder=Path(__file__).parent,  # it has prefect.toml with the server's settings
    environment=_environment,
    port_taken="start the command again: it takes another port",
)
