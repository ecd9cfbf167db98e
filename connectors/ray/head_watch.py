"""Whether the local head answers: its processes may stand in the process table with their ports shut, or stand still.

Owns the question, and how often none may answer it. Asks at addresses of gRPC, without Ray, which would end this process. Knows
nothing of records and of what follows.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

import psutil

ASK_S = 5.0  # how long an answer may take
PAUSE_S = 2.0  # between two questions
LOOKS = 4  # in a row without an answer: below the minute after which Ray ends a driver whose head is gone
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # with empty settings
FRAME = 9  # bytes of a frame's head, the fourth of which is its kind
SETTINGS = 4


def answers(address: str) -> bool:
    """Whether a server of gRPC answers at host:port. The kernel takes connections for a process that stands still; it says nothing."""
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
    """What of a head does not answer, or stands still; None if all of it is well."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_STOPPED:
                return f"{process.name()} (process {pid}) is stopped"
    return next((f"nothing answers at {address}" for address in addresses if not answers(address)), None)


def stays_silent(addresses: Sequence[str], pids: Sequence[int]) -> str | None:
    """The same once it stayed so over all looks: a process may be stopped for a moment, and a host may be busy."""
    for look in range(LOOKS):
        if look:
            time.sleep(PAUSE_S)
        reason = silent(addresses, pids)
        if reason is None:
            return None
    return reason


class Watch:
    """Looks at the head that this process has joined, in a thread that ends with the process or when the head is silent."""

    def __init__(self, addresses: Sequence[str], pids: Sequence[int], end: Callable[[], None]) -> None:
        """end: ends the head, once it is silent."""
        self.reason: str | None = None  # what is silent
        self._of, self._end = (list(addresses), list(pids)), end
        self._ended = threading.Event()
        threading.Thread(target=self._look, name="head-watch", daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(PAUSE_S) and self.look() is None:
            continue

    def look(self) -> str | None:
        """Look now. What is silent, if anything is: the head is ended then."""
        if self.reason is None and (reason := stays_silent(*self._of)) and not self._ended.is_set():
            self.reason = reason
            self._end()
        return self.reason
