"""One Prefect server, one Ray head and one random model for all flow tests; runs are started by the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flow_runs import Workplace, make_workplace


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = make_workplace(tmp_path_factory.mktemp("workplace"))
    place.call("server", "start")
    yield place
    place.call("server", "stop")
