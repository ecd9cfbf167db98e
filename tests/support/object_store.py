"""moto's S3 server, which reads a range of an object where moto alone reads the whole object for each range, as no store does.

python -m tests.support.object_store --port 4599
"""

from __future__ import annotations

import argparse
import logging
import mmap
from typing import Any

from moto.s3.models import FakeKey
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer


def main() -> None:
    """Serve on loopback until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    read_ranges()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it prints each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=parser.parse_args().port, verbose=False)
    server.start()
    assert server._thread is not None, "it has started"
    server._thread.join()


def read_ranges() -> None:
    """Let moto map an object that lies on disk, instead of reading it."""
    whole: Any = FakeKey.value
    answered = S3Response.key_response

    def value(key: FakeKey) -> bytes | mmap.mmap:
        buffer: Any = key._value_buffer
        if not (key.contentsize and buffer._rolled):
            found: bytes = whole.fget(key)
            return found
        with key.lock:
            buffer.flush()
            return mmap.mmap(buffer.fileno(), 0, access=mmap.ACCESS_READ)

    def key_response(self: S3Response, request: Any, full_url: str, headers: dict[str, Any]) -> Any:
        status, found, content = answered(self, request, full_url, headers)
        return status, found, content[:] if isinstance(content, mmap.mmap) else content

    FakeKey.value = property(value, whole.fset)  # type: ignore[assignment]
    S3Response.key_response = key_response  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
