"""The server of `millrace view`: who is answered, what a browser may do with an answer, and the files that it serves."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from millrace.flows.viewer.answers import Viewer
from millrace.flows.viewer.app import HEADERS, INDEX, PAGE, SCRIPTS, STYLE, application, opened
from tests.support.viewed_run import NAME, write_viewed_run

LOGIN = ("millrace", "secret")
HERE = "http://127.0.0.1:4300"
REPOSITORY = Path(__file__).parents[3]
# what would make a text of a run a part of the page, or a program
FORBIDDEN = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"),
    *("DOMParser", "createContextualFragment", "setTimeout('", 'setTimeout("', "javascript:"),
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    root = str(tmp_path_factory.mktemp("runs"))
    write_viewed_run(root)
    return TestClient(application(Viewer(root, NAME), ":".join(LOGIN)), base_url=HERE)


ADDRESSES = (
    "/",
    f"/{NAME}",
    f"/{NAME}/1/kept0/kept0-0000",
    "/-/page/viewer.css",
    "/-/api",
    f"/-/api/{NAME}/overview",
    "/-/gone/x",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_nothing_is_answered_without_the_login(client: TestClient, address: str) -> None:
    for login in (None, ("millrace", "wrong")):
        refused = client.get(address, auth=login)
        assert refused.status_code == 401
        assert NAME not in refused.text
    assert client.get(address, auth=LOGIN).status_code in (200, 404)


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_answer_has_the_headers(client: TestClient, address: str) -> None:
    for login in (LOGIN, None):
        found = client.get(address, auth=login).headers
        assert {name: found.get(name) for name in HEADERS} == HEADERS
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_no_other_host_and_no_other_page_is_answered(client: TestClient) -> None:
    address = f"/-/api/{NAME}/overview"
    for host in ("evil.example", "evil.example:4300", "127.0.0.1.evil.example", "192.168.0.2:4300"):
        assert client.get(address, auth=LOGIN, headers={"host": host}).status_code == 403
    for site in ("cross-site", "same-site"):
        asked = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
        assert client.get(address, auth=LOGIN, headers=asked).status_code == 403
    asked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get(f"/{NAME}", auth=LOGIN, headers=asked).status_code == 200  # a link in a message
    answer = client.get(address, auth=LOGIN, headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_nothing_can_be_written(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, f"/-/api/{NAME}/overview", auth=LOGIN).status_code == 405


@pytest.mark.parametrize(
    ("address", "status"),
    {
        f"/-/api/{NAME}/iteration?iteration=1": 200,
        f"/-/api/{NAME}/iteration?iteration=99": 404,
        f"/-/api/{NAME}/iteration?iteration=one": 400,
        f"/-/api/{NAME}/nothing": 404,
        "/-/api/gone/overview": 500,
        "/-/api/%2e%2e/overview": 500,
        f"/-/api/compare?runs={NAME},gone": 500,
        "/-/api/compare?runs=": 400,
        f"/-/api/{NAME}/sql?q=drop table x": 400,
        "/-/page/app.py": 404,
        "/-/page/%2e%2e%2fapp.py": 404,
    }.items(),
)
def test_an_answer_says_by_its_status_what_is_wrong(client: TestClient, address: str, status: int) -> None:
    found = client.get(address, auth=LOGIN)
    assert found.status_code == status, found.text
    if status != 200 and address.startswith("/-/api/"):
        assert found.json()["error"]["what"]


def test_the_page_lists_its_files_and_loads_no_other() -> None:
    page = (PAGE / INDEX).read_text()
    assert re.findall(r'<script src="/-/page/([^"]+)"', page) == list(SCRIPTS)
    assert {path.name for path in PAGE.iterdir()} == {INDEX, STYLE, "icon.svg", *SCRIPTS}
    for path in PAGE.iterdir():
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", path.read_text())) - {
            "http://www.w3.org/2000/svg"
        }
        assert not addresses, (path.name, addresses)
        assert "@import" not in path.read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_a_text_into_a_page(name: str) -> None:
    script = (PAGE / name).read_text()
    assert script.startswith('"use strict";')
    assert [word for word in FORBIDDEN if word in script] == []


def test_the_page_ships_in_the_wheel() -> None:
    packaged = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = packaged["package-data"]["millrace.flows.viewer"]
    for path in PAGE.iterdir():
        assert any(fnmatch.fnmatch(f"page/{path.name}", pattern) for pattern in patterns), path.name


def test_the_server_listens_on_loopback_alone() -> None:
    with opened(None) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
