"""Every port that a run listens on, scanned as another user of the machine and as a web page: nothing answers beyond health.

The run has all that listens: Prefect's server, MLflow's page, Ray's head and actors, an engine, a router, sessions with a client of
their own, and ranks that meet. A port without a row fails.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.support.flow_runs import Workplace, basic, configuration, make_workplace, wait_until
from tests.support.scanner import (
    ORIGIN,
    OpenPort,
    are_figures,
    as_another_user,
    at_once,
    http,
    language,
    open_ports,
    processes_of,
    readable,
    said_to_anyone,
)

pytestmark = pytest.mark.slow

MODULE = """
import asyncio
from pathlib import Path

from millrace import Session

HERE = Path(__file__).parent


async def held(session: Session) -> float:
    served = session.base_url
    while (HERE / "hold").exists() and (HERE / "runs/a/iterations/000000/manifest.json").exists():
        (HERE / "serving").touch()
        await asyncio.sleep(0.05)
    await session.generate()
    return session.rng.random() + 0 * len(served)
"""
JSON = {"Content-Type": "application/json"}
WRONG: tuple[dict[str, str], ...] = ({}, {"Authorization": "Bearer wrong"}, basic("millrace:wrong"))
NO_ANSWER = (401, 403, 404, 405)
RAY_CALLS = (
    *("NodeInfoGcsService/GetAllNodeInfo", "InternalKVGcsService/InternalKVGet"),
    *("NodeManagerService/GetNodeStats", "JobInfoGcsService/GetAllJobInfo"),
    *("CoreWorkerService/PushTask", "CoreWorkerService/GetCoreWorkerStats"),
    *("RayletDriver/ClusterInfo", "RayletDriver/KVGet", "RayletDriver/KVPut", "RayletDriver/GetObject"),
    *("RayletDriver/Schedule", "RayletDriver/Init"),
)
SHUT = ("UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE")


@dataclass(frozen=True)
class Row:
    """A process that listens, by a word of its command.

    speaks: on its ports. open: what is answered to anyone, by path. asked: what else is asked for.
    """

    command: str
    speaks: tuple[str, ...]
    open: tuple[str, ...] = ()
    asked: tuple[tuple[str, str], ...] = ()


ENGINE = (
    *("/generate", "/flush_cache", "/update_weights_from_disk"),
    *("/weights_checker", "/release_memory_occupation"),
)
ROWS = {
    "Prefect server": Row(
        "millrace.connectors.prefect.app",
        ("http",),
        # its page is empty without the login, and it describes what every Prefect server can do
        ("GET /api/health", "GET /", "GET /docs", "GET /openapi.json"),
        (
            *(("POST", "/api/flow_runs/filter"), ("POST", "/api/block_documents/filter")),
            *(("GET", "/api/admin/settings"), ("GET", "/api/health")),
        ),
    ),
    "MLflow page": Row(
        "millrace.connectors.mlflow.app",
        ("http",),
        ("GET /health",),
        (
            *(("POST", "/api/2.0/mlflow/runs/search"), ("POST", "/graphql")),
            ("GET", "/ajax-api/2.0/mlflow/experiments/list"),
        ),
    ),
    "engine": Row(  # beside its own port one where it and the ranks meet
        "millrace.connectors.engines.embedded",
        ("http", "nothing"),
        ("GET /health",),
        tuple(("POST", path) for path in ENGINE),
    ),
    "router": Row(
        "router",
        ("http", "figures"),
        ("GET /health", "GET /liveness", "GET /readiness"),
        (
            *(("POST", "/generate"), ("GET", "/workers"), ("POST", "/workers")),
            *(("POST", "/v1/chat/completions"), ("GET", "/liveness"), ("GET", "/readiness")),
        ),
    ),
    "sessions": Row(
        "multiprocessing.spawn",
        ("http",),
        (),
        (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/generate")),
    ),
    "Ray's figures": Row("ray::DashboardAgent", ("figures", "grpc", "http")),
    "Ray's dashboard": Row("/ray/dashboard/dashboard.py", ("figures",)),
    "Ray's environments": Row("ray::RuntimeEnvAgent", ("http",)),
    "Ray's actors": Row("ray::", ("grpc", "nothing")),  # ranks meet there, and move gradients and weights
    "Ray's head": Row("/ray/core/src/ray/", ("grpc",)),
    "Ray's clients": Row("ray.util.client.server", ("grpc",)),
    "driver": Row("millrace.flows.commands", ("grpc",)),  # as Ray calls it back
}
# the number of their ports is fixed: the first head on a machine has them
OF_ONE_HEAD = {
    *(("Ray's dashboard", "figures"), ("Ray's figures", "http")),
}
COMMON = (
    *(("GET", "/"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/docs")),
    *(("GET", "/openapi.json"), ("POST", "/")),
)


@dataclass(frozen=True)
class Seen:
    """A port, the name of its row, and what it speaks."""

    port: OpenPort
    name: str | None
    speaks: str


@pytest.fixture(scope="module")
def place() -> Iterator[Workplace]:
    """A run that is held in its second iteration, with all servers. Another user may come as far as its folder."""
    with TemporaryDirectory(prefix="ports") as name:
        folder = Path(name)
        folder.chmod(0o711)
        place = make_workplace(folder)
        (folder / "my_rollouts.py").write_text(MODULE)
        (folder / "hold").touch()
        values = configuration()
        values["run"]["iterations"] = 2
        values["rollout"]["session"] = {"function": "my_rollouts:held", "max_tokens": 64, "timeout_s": 3600}
        values["trainer"]["world_size"] = 2
        values["sync"] = {"kind": "broadcast"}
        values["engines"] = {"threads": 1, "router": {"policy": "round_robin"}}
        values["evaluation"]["sets"] = []
        (folder / "run.yaml").write_text(yaml.safe_dump(values))
        driver = place.start("train", "run.yaml", f"storage.root={folder / 'runs'}")
        try:
            wait_until(lambda: (folder / "serving").exists() or driver.poll() is not None)
            assert driver.poll() is None, driver.communicate()[0]
            place.call("ui")
            yield place
            (folder / "hold").unlink()
            out, _ = driver.communicate(timeout=200)
            assert driver.returncode == 0, out  # the scan has done no harm
        finally:
            if driver.poll() is None:
                driver.kill()
            place.call("server", "stop")


@pytest.fixture(scope="module")
def ports(place: Workplace) -> list[Seen]:
    found = open_ports(processes_of(place.folder / "home"))
    spoken = at_once(lambda port: language(port.port), found)
    return [Seen(port, row_of(port), speaks) for port, speaks in zip(found, spoken, strict=True)]


def row_of(port: OpenPort) -> str | None:
    return next((name for name, row in ROWS.items() if row.command in port.command), None)


def pages(ports: list[Seen], *speaks: str) -> Iterator[tuple[Seen, Row]]:
    """The ports that speak one of these, with their rows."""
    for seen in ports:
        if seen.speaks in speaks:
            assert seen.name, seen
            yield seen, ROWS[seen.name]


def stranger(look: Callable[[], Any]) -> Any:
    """As another user, where this one may become one."""
    return as_another_user(look) if os.getuid() == 0 else look()


def test_each_port_has_a_row_each_row_a_port_and_all_are_on_loopback(ports: list[Seen]) -> None:
    assert [seen for seen in ports if seen.name is None] == []
    expected = {(name, speaks) for name, row in ROWS.items() for speaks in row.speaks}
    found = {(seen.name, seen.speaks) for seen in ports}
    assert expected - OF_ONE_HEAD <= found <= expected
    assert {seen.port.address for seen in ports} <= {"127.0.0.1", "::1"}


def test_nothing_answers_another_user_beyond_health(place: Workplace, ports: list[Seen]) -> None:
    asked: list[tuple[Any, ...]] = []
    for seen, row in pages(ports, "http"):
        paths = {*COMMON, *row.asked, *(every_path(place) if seen.name == "Prefect server" else ())}
        asked += [
            (seen.name, seen.port.port, verb, path, {**JSON, **headers})
            for verb, path in sorted(paths)
            for headers in WRONG
        ]

    def ask(question: Any) -> int:
        _, port, verb, path, headers = question
        return http(port, verb, path, headers, b"{}" if verb == "POST" else None).status

    answers = stranger(lambda: at_once(ask, asked))
    answered: dict[tuple[str, str], set[int]] = {}
    for (name, _, verb, path, _), status in zip(asked, answers, strict=True):
        if status not in NO_ANSWER:
            answered.setdefault((name, f"{verb} {path}"), set()).add(status)
    assert answered == {(name, path): {200} for name, row in ROWS.items() for path in row.open}


def test_where_figures_are_nothing_else_is(ports: list[Seen]) -> None:
    asked = [
        (seen.port.port, verb, path)
        for seen, row in pages(ports, "figures")
        for verb, path in (*COMMON, *row.asked)
    ]
    assert asked

    def answered(question: tuple[int, str, str]) -> str:
        answer = http(*question)
        closed = answer.status in (*NO_ANSWER, 501) or are_figures(answer)
        health = question[1:] == ("GET", "/health") and answer.start == b"OK"
        return "" if closed or health else f"{question}: {answer}"

    assert {*stranger(lambda: at_once(answered, asked))} == {""}


def every_path(place: Workplace) -> list[tuple[str, str]]:
    """What Prefect's own description lists that takes no name in its path."""
    page = place.api.removesuffix("/api")
    for where in ("/openapi.json", "/api/openapi.json"):
        try:
            with urlopen(Request(page + where, headers=basic(place.login)), timeout=60) as answer:
                listed = json.loads(answer.read())["paths"]
        except (OSError, ValueError):
            continue
        return [
            (verb.upper(), path)
            for path, verbs in listed.items()
            for verb in verbs
            if verb in ("get", "post") and "{" not in path
        ]
    raise AssertionError("Prefect's server describes itself nowhere")


def test_a_web_page_may_read_nothing(place: Workplace, ports: list[Seen]) -> None:
    for seen, row in pages(ports, "http", "figures"):
        for verb, path in (*COMMON, *row.asked):
            for secret in (basic(place.login), {}):
                sent = {**JSON, **secret, "Origin": ORIGIN}
                got = http(seen.port.port, verb, path, sent, b"{}" if verb == "POST" else None)
                assert got.allowed is None, (seen, path)
                if seen.name in ("engine", "sessions"):
                    assert got.status == 403, (seen, path)
        asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        first = row.asked[0][1] if row.asked else "/"
        assert http(seen.port.port, "OPTIONS", first, asked).allowed is None, seen


def status_of_call(question: tuple[int, str]) -> str:
    """What a port says to a call of Ray's without the token."""
    grpc = pytest.importorskip("grpc")
    port, call = question
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{call}")(b"", timeout=20)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def test_ray_takes_no_call_without_its_token(ports: list[Seen]) -> None:
    asked = [(seen.port.port, call) for seen in ports if seen.speaks == "grpc" for call in RAY_CALLS]
    answers = stranger(lambda: at_once(status_of_call, asked))
    said = dict(zip(asked, answers, strict=True))
    assert {place: answer for place, answer in said.items() if answer not in SHUT} == {}
    refused = {call for (_, call), answer in said.items() if answer == "UNAUTHENTICATED"}
    assert refused == set(RAY_CALLS)  # each stands somewhere


def test_where_ranks_meet_nothing_is_said_to_who_only_connects(ports: list[Seen]) -> None:
    meeting = [seen.port.port for seen in ports if seen.speaks == "nothing"]
    assert len(meeting) > 4
    assert set(stranger(lambda: [said.decode("latin-1") for said in at_once(said_to_anyone, meeting)])) == {
        ""
    }


def test_no_file_socket_or_memory_of_the_run_opens_for_another_user(place: Workplace) -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    heads = json.loads((place.folder / "home" / "ray.json").read_text())["folder"]
    owned = [path for path in Path("/dev/shm").iterdir() if path.lstat().st_uid == os.getuid()]
    folders = [place.folder / "home", place.folder / "runs", Path(heads), *owned]
    assert readable(folders)  # by their owner
    seen = as_another_user(lambda: readable([place.folder / "model"]))
    assert str(place.folder / "model" / "config.json") in seen  # which it was not made for: the scan works
    assert as_another_user(lambda: readable(folders)) == []


def test_no_command_line_shows_a_secret(place: Workplace) -> None:
    home = place.folder / "home"
    secrets = [place.login.strip().split(":")[1], (home / "ray-token").read_text().strip()]
    for process in processes_of(home):
        line = " ".join(process.cmdline())
        assert not [secret for secret in secrets if secret in line], line
