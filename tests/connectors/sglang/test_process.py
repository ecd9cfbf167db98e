"""What a server's holder leaves in the file system."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from millrace.connectors.engines.process import PORT_TRIES, EngineServer
from millrace.connectors.engines.sglang.server_args import PYTHON_PATH
from millrace.connectors.host.kernel_folders import kernel_key
from millrace.connectors.storage.kernel_cache import KernelCache
from millrace.core.errors import EngineError
from tests.support.flow_runs import Patience
from tests.support.local_handle import COUNT, fleet_config
from tests.support.sglang_stand_in import install


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


def test_a_server_is_reached_where_a_proxy_is_set_that_does_not_reach_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it was asked through the proxy, and taken for silent until engines.start_timeout_s."""
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.delenv(name.replace("HTTP", "NO").replace("http", "no"), raising=False)
    config = fleet_config(tiny_model).model_dump(mode="json")
    config["storage"]["root"] = str(tmp_path)
    config["engines"]["start_timeout_s"] = 60
    server = EngineServer(config, 0, COUNT)
    server.start(str(tiny_model))
    try:
        assert server.state()["alive"]
        assert not {"HTTP_PROXY", "http_proxy"} & set(psutil.Process(server.state()["pid"]).environ())
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


RACE = """
import os, signal, socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

starts = Path(os.environ["STARTS"])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) <= int(os.environ["LOST"]):
    with socket.socket() as mine, socket.socket() as other:
        mine.bind(("127.0.0.1", 0))
        try:
            other.bind(mine.getsockname())
        except OSError as error:
            if os.environ["ENDS"] == "error":
                raise
            print(error, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""

COMPILES = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

kernels = Path(os.environ["TRITON_CACHE_DIR"])
print(*kernels.iterdir(), flush=True)
(kernels / "COMPILED").mkdir()
(kernels / "COMPILED" / "launcher.so").write_text("kernel")

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


@pytest.mark.parametrize(
    ("lost", "ends"), [(0, ""), (2, "error"), (2, "signal"), (3, "error"), (3, "signal")]
)
def test_a_start_that_lost_a_port_to_another_process_is_made_again(
    lost: int, ends: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in install(tmp_path / "site", RACE).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("LOST", str(lost))
    monkeypatch.setenv("ENDS", ends)
    config = fleet_config(tiny_model, engines={"kind": "sglang"}).model_dump(mode="json")
    config["storage"]["root"] = str(tmp_path)
    server = EngineServer(config, 0, COUNT)
    try:
        if lost < PORT_TRIES:
            assert server.start(str(tiny_model))["alive"]
        else:
            with pytest.raises(EngineError, match=r"(?s)engine 0 \(sglang\) ended.*Address already in use"):
                server.start(str(tiny_model))
        assert len((tmp_path / "starts").read_text()) == min(lost + 1, PORT_TRIES)
    finally:
        server.stop()


def test_a_server_compiles_into_its_hosts_folder_with_what_the_cache_has_and_gives_the_rest(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = install(tmp_path / "site", COMPILES)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    key = kernel_key(environment[PYTHON_PATH].split(os.pathsep))
    (tmp_path / "given" / "triton" / "STORED").mkdir(parents=True)
    (tmp_path / "given" / "triton" / "STORED" / "launcher.so").write_text("kernel")
    giver = KernelCache(str(tmp_path / "store"), key, tmp_path / "given", print)
    assert giver.give() == 1
    placement = {"kernel_cache": str(tmp_path / "store")}
    config = fleet_config(tiny_model, engines={"kind": "sglang"}, placement=placement).model_dump(mode="json")
    config["storage"]["root"] = str(tmp_path)
    server = EngineServer(config, 0, COUNT)
    try:
        server.start(str(tiny_model))
        assert "STORED" in server.log.read_text()
        patience = Patience(30)
        while giver.take() == 0:
            assert patience.left
            time.sleep(0.05)
    finally:
        server.stop()
    assert (tmp_path / "given" / "triton" / "COMPILED" / "launcher.so").read_text() == "kernel"
