"""An S3 API server for whoever needs one, how long a test may take, which modules it leaves, and that Ctrl-C ends what it starts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ctrl_c import heed_ctrl_c

WHOLE_RUNS_S = 3600  # slow tests wait with patience of their own, which lasts longer on a busy machine


def pytest_configure() -> None:
    """Tests press Ctrl-C in commands that they start, also where pytest was started in the background."""
    heed_ctrl_c()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test is not ended by the time that is enough for others."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WHOLE_RUNS_S))


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test's own modules and the folders in which they are found end with it: others have modules of the same names."""
    places, known, written = list(sys.path), set(sys.modules), tmp_path_factory.getbasetemp()
    yield
    sys.path[:] = places
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(written):
            del sys.modules[name]


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """URL of a bucket; endpoint and credentials stand in the environment, as a user gives them."""
    import boto3
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    one_put = threading.Lock()
    put_object = S3Response.put_object

    def put_at_once(response: S3Response) -> Any:
        """S3 judges a condition and stores the object at once; moto does one after the other."""
        with one_put:
            return put_object(response)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setattr(S3Response, "put_object", put_at_once)
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("NO_PROXY", "127.0.0.1,localhost")
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    server.stop()
