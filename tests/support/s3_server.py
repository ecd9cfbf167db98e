"""An S3 API server on loopback, and what a process needs to find it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

BUCKET = "bucket"


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """A server with a bucket, in threads of this process; the variables that name it, as a user sets them."""
    import boto3
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    one_put = threading.Lock()
    put_object = S3Response.put_object

    def put_at_once(response: S3Response) -> Any:
        """S3 judges a condition and stores the object at once; moto does one after the other."""
        with one_put:
            return put_object(response)

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it prints each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    S3Response.put_object = put_at_once
    try:
        boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        ).create_bucket(Bucket=BUCKET)
        yield variables
    finally:
        S3Response.put_object = put_object
        server.stop()
