"""The local head's folder, the token that it wants, and the check that it answers.

Its processes may live with closed ports, or be stopped: the check speaks to gRPC addresses without Ray, which would end this
process, and owns how often it may fail in a row. A configured cluster gets the user's own token. Knows nothing of records, nor
of the consequences.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from millrace.connectors.host.local_files import PRIVATE_FOLDER, home, secret_file
from millrace.core.errors import ConfigError

SOCKET_BYTES = 107  # Linux's bound on a socket's path
RAYS = "r"  # Ray's folder inside the head's; Ray makes it accessible to all users, the head's stays private
SOCKET = f"/{RAYS}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # the longest path


def parent() -> Path:
    """The parent of heads' folders."""
    return Path(os.environ.get("RAY_TMPDIR", "/tmp")).absolute()


def prefix() -> str:
    """The prefix of this home's head folders, by which a head without a usable record is found."""
    whose = f"{os.getuid()}:{home().absolute()}"
    return f"millrace-ray-{hashlib.sha256(whose.encode()).hexdigest()[:6]}-"


def is_heads(folder: str) -> bool:
    """Whether this is the name of a head's folder. Checked because the folder that a record names is removed."""
    return Path(folder).is_absolute() and Path(folder).name.startswith("millrace-ray-")


def check_length() -> None:
    """Raise ConfigError if RAY_TMPDIR is too long for the paths of Ray's sockets."""
    most = SOCKET_BYTES - len(f"/{prefix()}0000{SOCKET}")
    length = len(os.fsencode(parent()))
    if length > most:
        raise ConfigError(
            f"has {length} bytes: a socket's path in Ray's folder there would have more than {SOCKET_BYTES}",
            where=f"RAY_TMPDIR = {parent()}",
            remedy=f"name a folder of at most {most} bytes, or unset it: Ray's folder is in /tmp then",
        )


def make() -> Path:
    """Create a folder for a head that no other user may enter. Raises the errors of `check_length`."""
    check_length()
    parent().mkdir(parents=True, exist_ok=True)
    folder = parent() / f"{prefix()}{secrets.token_hex(2)}"
    folder.mkdir(mode=PRIVATE_FOLDER)
    return folder


AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN = "ray-token"  # in MILLRACE_HOME


def with_token(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Ray requires the local head's token, and presents it."""
    rest = {name: value for name, value in environment.items() if name not in AUTHENTICATION}
    return {**rest, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(secret_file(TOKEN))}


def present_token(*, local: bool) -> None:
    """Let this process present the token to the local head, and the user's own settings to a configured cluster."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

    if local:
        wanted = with_token(os.environ)
    elif os.environ.get("RAY_AUTH_TOKEN_PATH") == str(home() / TOKEN) and "RAY_AUTH_TOKEN" not in os.environ:
        wanted = {name: value for name, value in os.environ.items() if name not in AUTHENTICATION}
    else:
        return
    for name in AUTHENTICATION:
        os.environ.pop(name, None)
        if name in wanted:
            os.environ[name] = wanted[name]
    # Ray has read the environment at its import, so it must read it again
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


ASK_S = 5.0  # seconds that an answer may take
PAUSE_S = 2.0  # seconds between two checks
LOOKS = 4  # failed checks in a row; together they take less than the minute after which Ray ends a driver
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # with empty settings
FRAME = 9  # bytes of a frame's header; the fourth is its type
SETTINGS = 4


def answers(address: str) -> bool:
    """Whether a gRPC server answers at host:port. Connecting proves nothing: the kernel accepts for a stopped process too."""
    host, _, port = address.rpartition(":")
    found = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ASK_S) as connection:
            connection.sendall(HELLO)
            while len(found) < FRAME and (part := connection.recv(FRAME - len(found))):
                found += part
    except OSError:
        return False
    return len(found) == FRAME and found[3] == SETTINGS


def silent(addresses: Sequence[str], pids: Sequence[int]) -> str | None:
    """The part of a head that is stopped or does not answer; None if all parts answer."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_STOPPED:
                return f"{process.name()} (process {pid}) is stopped"
    return next((f"nothing answers at {address}" for address in addresses if not answers(address)), None)


def stays_silent(addresses: Sequence[str], pids: Sequence[int]) -> str | None:
    """The same, but only after LOOKS failed checks: a process may be stopped for a moment, or the host busy."""
    for look in range(LOOKS):
        if look:
            time.sleep(PAUSE_S)
        reason = silent(addresses, pids)
        if reason is None:
            return None
    return reason


class HeadWatch:
    """Checks the head that this process has joined, in a thread that ends with the process or when the head is silent."""

    def __init__(self, addresses: Sequence[str], pids: Sequence[int], end: Callable[[], None]) -> None:
        """end: ends the head, called when it is silent."""
        self.reason: str | None = None  # why the head counts as silent
        self._of, self._end = (list(addresses), list(pids)), end
        self._ended = threading.Event()
        threading.Thread(target=self._look, name="head-watch", daemon=True).start()

    def end(self) -> None:
        """Stop checking."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(PAUSE_S) and self.look() is None:
            continue

    def look(self) -> str | None:
        """Check now. Returns the silent part, after the head was ended; None if all parts answer."""
        if self.reason is None and (reason := stays_silent(*self._of)) and not self._ended.is_set():
            self.reason = reason
            self._end()
        return self.reason
