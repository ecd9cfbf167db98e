"""The local Prefect server: each MILLRACE_HOME has its own, also when two are started at the same moment."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from millrace.connectors.prefect.server import listening
from millrace.core.errors import MillraceError
from tests.support.flow_runs import Workplace


def test_two_servers_started_at_once_are_two_and_each_is_stopped_by_its_own_home(tmp_path: Path) -> None:
    places = [Workplace(tmp_path / name) for name in ("one", "two")]
    for place in places:
        place.folder.mkdir()
    starting = [place.start("server", "start") for place in places]
    for process in starting:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, out
    records = [json.loads((p.folder / "home" / "prefect-server.json").read_text()) for p in places]
    assert len({record["url"] for record in records}) == 2
    assert all(psutil.pid_exists(record["pid"]) for record in records)
    assert "stopped" in places[0].call("server", "stop")
    assert psutil.Process(records[1]["pid"]).is_running()
    assert "stopped" in places[1].call("server", "stop")


def test_a_port_is_held_from_the_moment_it_is_chosen() -> None:
    with listening(0) as chosen:
        port = chosen.getsockname()[1]
        with pytest.raises(MillraceError, match=str(port)):
            listening(port)
        with listening(port, 0) as another:
            assert another.getsockname()[1] != port
    with listening(port) as again:
        assert again.getsockname() == ("127.0.0.1", port)
