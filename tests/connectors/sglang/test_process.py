"""What a server's holder leaves in the file system."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from millrace.connectors.sglang.process import EngineServer
from millrace.core.errors import EngineError
from tests.support.local_handle import COUNT, fleet_config


def test_a_started_server_leaves_its_log_alone_in_the_runs_folder(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, run = tmp_path / "temporary", tmp_path / "root" / "engines-under-test"
    temporary.mkdir()
    run.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    config = fleet_config(tiny_model).model_dump(mode="json")
    config["storage"]["root"] = str(run.parent)
    config["run"]["name"] = run.name
    server = EngineServer(config, 0, COUNT)
    with pytest.raises(EngineError, match=f"the end of {run}/logs/engine-0.log"):
        server.start(str(tmp_path / "no model"))
    server.start(str(tiny_model))
    try:
        assert server.state()["alive"]
        assert list(run.glob("**/*.*")) == [server.log]
        assert list(temporary.iterdir()) == []
    finally:
        server.stop()


@pytest.mark.parametrize("root", ["s3://bucket/runs", "/no/such/folder"])
def test_the_log_of_a_run_whose_folder_this_host_does_not_have_lies_in_the_home(
    root: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    config = fleet_config(tiny_model).model_dump(mode="json")
    config["storage"]["root"] = root
    log = EngineServer(config, 0, COUNT).log
    assert log.name == "engine-0.log"
    assert log.parent.parent == tmp_path / "logs"
    assert log.parent.name.startswith(config["run"]["name"])
