"""`python -m tests.support.tiny_server FD HOME`: a server of a home that answers that it is there, and nothing else."""

from __future__ import annotations

import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers(BaseHTTPRequestHandler):
    """Answers every GET with an empty page."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()


def main() -> None:
    """Serve on the inherited socket until ended."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers, bind_and_activate=False)
    server.socket = socket.socket(fileno=int(sys.argv[1]))
    server.serve_forever()


if __name__ == "__main__":
    main()
