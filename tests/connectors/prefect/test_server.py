"""The local Prefect server: each MILLRACE_HOME has its own, also when two are started at the same moment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from millrace.connectors.host.local_server import listening
from millrace.connectors.host.process_identity import is_alive
from millrace.connectors.prefect import server
from millrace.core.errors import ConfigError, MillraceError
from tests.support.flow_runs import Workplace, basic

ODD_RECORDS = [
    b"",
    b"{}",
    b"[]",
    b"17",
    b'{"url": "http://127.0.0.1:42',
    b'{"url": 17, "pid": 1, "created": 1.0}',
    b'{"url": "http://127.0.0.1:4200/api", "pid": "many", "created": 1.0}',
    b'{"url": "http://127.0.0.1:4200/api", "pid": 1}',
    b"\xff\x00",
    b"[" * 10_000,
]


@pytest.mark.slow
def test_two_servers_started_at_once_are_two_and_each_is_stopped_by_its_own_home(tmp_path: Path) -> None:
    places = [Workplace(tmp_path / name) for name in ("one", "two")]
    for place in places:
        place.folder.mkdir()
    starting = [place.start("server", "start") for place in places]
    outputs: list[str] = []
    for process in starting:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, out
        outputs.append(out)
    records = [json.loads((p.folder / "home" / "prefect-server.json").read_text()) for p in places]
    assert len({record["url"] for record in records}) == 2
    assert all(psutil.pid_exists(record["pid"]) for record in records)
    for place, other in (places, places[::-1]):
        url, own = place.api, basic(place.login)
        assert answer(f"{url}/health") == (200, None)
        for without in ({}, basic(other.login), basic("admin:pass"), {"Authorization": "Bearer x"}):
            for verb, path in (
                ("POST", "/flow_runs/filter"),
                ("GET", "/admin/settings"),
                ("GET", "/version"),
            ):
                assert answer(url + path, without, verb) == (401, None), (path, without)
        origin = {"Origin": "https://example.org"}
        assert answer(f"{url}/flow_runs/filter", {**own, **origin}, "POST") == (200, None)
        page = url.removesuffix("/api")
        assert answer(f"{url}/flow_runs/filter", {**own, "Origin": page}, "POST") == (200, page)
        home = place.folder / "home"
        # folders below prefect-page have the modes of the installed page, whose copy they are
        page_folder = home / "prefect-page"
        made = [home, *(path for path in home.rglob("*") if page_folder not in path.parents)]
        assert len(made) > 5
        assert page_folder in made
        assert not [path for path in made if path.stat().st_mode & 0o077 and not path.is_symlink()]
        assert not [line for line in map(command, made_by(records)) if place.login.split(":")[1] in line]
    assert "prefect-auth" in outputs[0]
    record = places[0].folder / "home" / "prefect-server.json"
    record.write_text(record.read_text()[:20])  # and it is found without its record
    assert "stopped" in places[0].call("server", "stop")
    assert not is_alive(records[0]["pid"], records[0]["created"])
    assert not record.exists()
    assert psutil.Process(records[1]["pid"]).is_running()
    assert "stopped" in places[1].call("server", "stop")


@pytest.mark.parametrize("content", ODD_RECORDS)
def test_what_is_no_record_of_a_server_is_told_and_taken_for_none(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    record = tmp_path / "prefect-server.json"
    record.write_bytes(content)
    assert not server.restart_dead_server()
    assert not server.stop_server()
    assert str(record) in caplog.text
    assert not record.exists()


def test_a_record_that_cannot_be_read_is_named_and_its_remedy_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    record = tmp_path / "prefect-server.json"
    record.mkdir()
    with pytest.raises(MillraceError, match="prefect-server.json: cannot be read: .*; remove it") as raised:
        server.stop_server()
    Path(raised.value.where).rmdir()
    assert not server.stop_server()


def test_a_prefect_profile_that_cannot_be_read_is_named_and_its_remedy_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    profiles = tmp_path / "profiles.toml"
    profiles.write_text("active = [")
    with pytest.raises(MillraceError, match="profiles.toml: cannot be read: .*; correct it, or move it away"):
        server.ensure_server()
    profiles.write_text('active = "x"\n[profiles.x]\nPREFECT_API_URL = "http://there/api"\n')
    assert server.ensure_server() == "http://there/api"


def answer(url: str, headers: Mapping[str, str] = {}, verb: str = "GET") -> tuple[int, str | None]:
    """The status, and the origin whose pages may read the answer."""
    sent = {"Content-Type": "application/json", **headers}
    request = Request(url, b"{}" if verb == "POST" else None, sent, method=verb)
    try:
        with urlopen(request, timeout=60) as got:
            return got.status, got.headers["Access-Control-Allow-Origin"]
    except HTTPError as error:
        return error.code, error.headers["Access-Control-Allow-Origin"]


def command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def made_by(records: list[dict[str, Any]]) -> list[psutil.Process]:
    servers = [psutil.Process(record["pid"]) for record in records]
    return [*servers, *(child for server in servers for child in server.children(recursive=True))]


@pytest.mark.parametrize("page", ["http://127.0.0.1:4200", "http://127.0.0.1:4200/"])
def test_the_address_of_the_page_is_refused_with_that_of_its_api(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", page)
    with pytest.raises(ConfigError, match="export PREFECT_API_URL=http://127.0.0.1:4200/api$"):
        server.ensure_server()


def test_an_address_of_a_server_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    gone = listening(0)
    assert gone is not None
    url = f"http://127.0.0.1:{gone.getsockname()[1]}/api"
    gone.close()
    monkeypatch.setenv("PREFECT_API_URL", url)
    with pytest.raises(ConfigError, match="no server is there .*unset PREFECT_API_URL"):
        server.ensure_server()


def test_a_port_is_held_from_the_moment_it_is_chosen() -> None:
    def port_of(*ports: int) -> tuple[socket.socket, int]:
        chosen = listening(*ports)
        assert chosen is not None
        return chosen, chosen.getsockname()[1]

    chosen, port = port_of(0)
    assert listening(port) is None
    another, other = port_of(port, 0)
    assert other != port
    chosen.close()
    again, same = port_of(port)
    assert again.getsockname() == ("127.0.0.1", port)
    assert same == port
    another.close()
    again.close()


def test_the_page_is_copied_into_the_home_and_not_beside_prefects_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect copies it at the first start, by default into the installation, where another user may not write."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_UI_STATIC_DIRECTORY", "/nowhere")  # of a user who has another server
    code = "from prefect.settings import get_current_settings as s; print(s().server.ui.static_directory)"
    environment = {**os.environ, **server._environment("http://127.0.0.1:1")}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert Path(told.stdout.strip()).parent == tmp_path / "home", told.stderr
