"""What a stranger sees of a run on this machine: its open ports, what they answer without a secret, and which of its files open.

Owns no promise: tests say which answers are allowed. `as_another_user` makes the same calls as a user who owns nothing.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, TypeVar

import psutil

Item = TypeVar("Item")
Found = TypeVar("Found")
NOBODY = 65534
ORIGIN = "https://example.org"
SILENCE_S = 2.0  # without a word, after which a port has nothing to say
LOOKS = 32  # at once
FIGURES = (b"# HELP ", b"# TYPE ")  # how Prometheus' text begins
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@dataclass(frozen=True)
class OpenPort:
    """A port on which a process of the run listens."""

    address: str
    port: int
    pid: int
    command: str


@dataclass(frozen=True)
class Answer:
    """To an HTTP request; status 0 where nothing came that is HTTP."""

    status: int
    allowed: str | None = None  # the origin whose pages may read it
    start: bytes = b""


def processes_of(home: Path) -> set[psutil.Process]:
    """Every process of a MILLRACE_HOME: those that its name in their environment shows, which daemons keep, and what they began.

    A process that gives itself a title, as Ray's actors do, overwrites its environment.
    """
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("MILLRACE_HOME") == str(home):
                found |= {process, *process.children(recursive=True)}
    return found


def open_ports(processes: Iterable[psutil.Process]) -> list[OpenPort]:
    """Where the processes listen, each port once: children share their parents' sockets."""
    found: dict[int, OpenPort] = {}
    for process in sorted(processes, key=lambda process: process.pid):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = " ".join(process.cmdline())
            for item in process.net_connections("inet"):
                if item.status == "LISTEN":
                    ip = item.laddr.ip.removeprefix("::ffff:")
                    found.setdefault(item.laddr.port, OpenPort(ip, item.laddr.port, process.pid, command))
    return list(found.values())


def http(
    port: int, verb: str, path: str, headers: Mapping[str, str] = {}, body: bytes | None = None
) -> Answer:
    """What an HTTP request is answered."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(verb, path, body, dict(headers))
        got = connection.getresponse()
        return Answer(got.status, got.headers["Access-Control-Allow-Origin"], got.read(200))
    except (HTTPException, OSError):
        return Answer(0)
    finally:
        connection.close()


def said_to_anyone(port: int, greeting: bytes = b"") -> bytes:
    """What a port says to whoever connects and says nothing, or this."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.settimeout(SILENCE_S)
        connection.sendall(greeting)
        return connection.recv(200)
    return b""


def language(port: int) -> str:
    """What a port speaks: http, figures (whatever is asked for), grpc, or nothing to a stranger who speaks any of them."""
    if said_to_anyone(port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").startswith(b"HTTP/1"):
        said = [http(port, "GET", path) for path in ("/", "/no/such/path")]
        return (
            "figures"
            if any(answer.start and are_figures(answer) for answer in said) or are_figures(said[1])
            else "http"
        )
    return "grpc" if said_to_anyone(port, HTTP2).startswith(b"\x00\x00") else "nothing"


def are_figures(answer: Answer) -> bool:
    """Whether it is Prometheus' text, which is empty while nothing was counted."""
    return answer.status == 200 and (not answer.start or answer.start.startswith(FIGURES))


def at_once(look: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """What a look at each finds, in their order, many at a time: some ports leave every question without an answer."""
    with ThreadPoolExecutor(LOOKS) as pool:
        return list(pool.map(look, items))


def readable(folders: Iterable[Path]) -> list[str]:
    """Files, sockets and folders at or below these that this process can open, or change."""
    found = []
    for folder in folders:
        for path in (folder, *_below(folder)):
            with suppress(OSError):
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode):
                    continue
                if stat.S_ISSOCK(mode):
                    with socket.socket(socket.AF_UNIX) as sock:
                        sock.connect(str(path))
                elif stat.S_ISDIR(mode):
                    os.listdir(path)
                else:
                    path.open("rb").close()
                found.append(str(path))
    return found


def _below(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(folder.rglob("*"))


def as_another_user(look: Callable[[], Any]) -> Any:
    """What a function returns, as JSON, when a user who owns nothing calls it. Needs root."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = json.dumps({"found": look()})
        except BaseException as error:  # noqa: BLE001 - it is the parent's to raise
            said = json.dumps({"failed": repr(error)})
        with os.fdopen(writing, "w") as file:
            file.write(said)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        answer = json.loads(file.read())
    os.waitpid(child, 0)
    assert "failed" not in answer, answer["failed"]
    return answer["found"]
