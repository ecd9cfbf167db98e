"""A local Ray head of its own, in a MILLRACE_HOME of its own, ended by the processes it recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.connectors.ray import cluster


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """MILLRACE_HOME under which the head is started and found again; the head ends with the session."""
    home = tmp_path_factory.mktemp("ray-home")
    yield home
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MILLRACE_HOME", str(home))
        cluster.stop_local_head()


@pytest.fixture
def ray_home(head_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The environment of a driver; what it joined it leaves."""
    monkeypatch.setenv("MILLRACE_HOME", str(head_folder))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=":")
    yield head_folder
    cluster.leave()


@pytest.fixture
def joined(ray_home: Path, request: pytest.FixtureRequest) -> str:
    """This process joined to the head, in a namespace of the test's own."""
    cluster.start_or_join(None, request.node.name)
    return str(request.node.name)
