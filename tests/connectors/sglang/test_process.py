"""What a server's holder leaves in the file system."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from millrace.connectors.sglang.process import EngineServer
from millrace.core.errors import EngineError
from tests.support.local_handle import COUNT, fleet_config


def test_a_started_server_leaves_its_log_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = EngineServer(fleet_config(tiny_model).model_dump(mode="json"), 0, COUNT)
    with pytest.raises(EngineError, match="the end of"):
        server.start(str(tmp_path / "no model"))
    server.start(str(tiny_model))
    try:
        assert server.state()["alive"]
        assert list(tmp_path.iterdir()) == [server.log]
    finally:
        server.stop()
