"""A proxy before an S3 server on loopback, whose listings are late and which fails, by a seed.

Objects are read as they were last written, as S3 promises; listings are what a cache or a weaker store makes of them.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

RECENT_S = 5.0
CONTENTS = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
WRITTEN = re.compile(rb"<LastModified>([^<]+)</LastModified>")
HOP_BY_HOP = ("transfer-encoding", "connection", "content-length", "expect")
Answer = tuple[int, list[tuple[str, str]], bytes]


@dataclass
class Odds:
    """How often each fault happens, from 0 to 1."""

    errors: float = 0.0  # 503, and the server is not asked
    lost: float = 0.0  # the server did it, and its answer does not arrive
    slow: float = 0.0  # the answer comes one to three seconds late
    stale: float = 0.0  # a listing that was asked for less than RECENT_S ago is answered as then
    hidden: float = 0.0  # a name written less than RECENT_S ago is left out of a listing
    named: str = ""  # hidden are the names alone in which this pattern is found
    only: str = ""  # stale and hidden are the listings alone whose address holds this text
    seed: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def drawn(self, kind: str) -> bool:
        """Whether a fault happens now."""
        with self.lock:
            happens = self.draw.random() < getattr(self, kind)
            self.happened[kind] += happens
        return happens

    def shown(self, entry: re.Match[bytes]) -> bytes:
        """An entry of a listing, or nothing of it."""
        written = WRITTEN.search(entry[0])
        assert written
        age = datetime.now(UTC) - datetime.fromisoformat(written[1].decode())
        concerned = re.search(self.named.encode(), entry[0]) and age.total_seconds() < RECENT_S
        return b"" if concerned and self.drawn("hidden") else entry[0]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Nothing is printed: processes that are killed hang up."""


@contextlib.contextmanager
def late_s3(upstream: str, odds: Odds) -> Iterator[str]:
    """Endpoint of the proxy before the server at a URL."""
    server = _Server(("127.0.0.1", 0), _handler(upstream, odds))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Request(BaseHTTPRequestHandler):
    """One request of a connection: its body, and its answer."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self._whole(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self._line().split(b";")[0], 16):
            body += self._whole(size)
            self._line()
        self._line()
        return body

    def _whole(self, size: int) -> bytes:
        """So many bytes. S3 stores no object whose sender hung up amid it: then nothing is passed on."""
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionResetError("the request is cut")
        return data

    def _line(self) -> bytes:
        line = self.rfile.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the request is cut")
        return line

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _answer(self, answer: Answer) -> None:
        status, headers, data = answer
        with contextlib.suppress(OSError):  # whoever asked has gone
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if not any(name == "Content-Length" for name, _ in headers):
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)


def _handler(upstream: str, odds: Odds) -> type[BaseHTTPRequestHandler]:
    before: dict[str, tuple[float, Answer]] = {}
    place = urlsplit(upstream)

    class Proxy(_Request):
        def handle_any(self) -> None:
            body = self._body()
            if odds.drawn("errors"):
                code, name = odds.draw.choice([(500, b"InternalError"), (503, b"SlowDown")])
                text = b"<Error><Code>" + name + b"</Code><Message>x</Message></Error>"
                self._answer((code, [("Content-Type", "application/xml")], text))
                return
            if odds.drawn("slow"):
                time.sleep(odds.draw.uniform(1.0, 3.0))
            listing = self.command == "GET" and "list-type" in self.path and odds.only in self.path
            earlier = before.get(self.path) if listing else None
            if earlier and time.monotonic() - earlier[0] < RECENT_S and odds.drawn("stale"):
                self._answer(earlier[1])
                return
            answer = self._asked(body)
            if listing:
                answer = answer[0], answer[1], CONTENTS.sub(odds.shown, answer[2])
                before[self.path] = time.monotonic(), answer
            if odds.drawn("lost"):
                self._hang_up()
                return
            self._answer(answer)

        def _asked(self, body: bytes) -> Answer:
            assert place.hostname
            server = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            try:
                server.request(self.command, self.path, body, headers)
                reply = server.getresponse()
                data = reply.read()
                kept = [(name, value) for name, value in reply.getheaders() if name.lower() not in HOP_BY_HOP]
                size = reply.getheader("Content-Length") or "0"
                kept += [("Content-Length", size)] if self.command == "HEAD" else []
                return reply.status, kept, data
            finally:
                server.close()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

    return Proxy
