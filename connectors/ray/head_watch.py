"""Checks that the local head answers: its processes may live with closed ports, or be stopped.

Owns the check, and how often it may fail in a row. Speaks to gRPC addresses without Ray, which would end this process. Knows
nothing of records, nor of the consequences.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

import psutil

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
