"""One Prefect server, one Ray head and one random model for all flow tests; runs are started by the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.flow_runs import Workplace, make_workplace


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = make_workplace(tmp_path_factory.mktemp("workplace"))
    place.call("server", "start")
    yield place
    place.call("server", "stop")


@pytest.fixture(scope="session")
def whole(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `a`, never interrupted."""
    root = tmp_path_factory.mktemp("whole")
    out = workplace.train(root)
    assert "3 iterations complete, 3 of them now" in out
    return root / "a"
