"""A proxy of the environment is not asked for this host's addresses, and still for all others."""

from __future__ import annotations

import os
import urllib.request

import httpx
import pytest
import requests.utils

from millrace.connectors.host.own_addresses import NAMES, reach_directly, reach_own_directly, without_proxy

DEAD = "http://127.0.0.1:9"
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "HTTP_PROXY": {"HTTP_PROXY": DEAD},
    "http_proxy": {"http_proxy": DEAD},
    "HTTPS_PROXY": {"HTTPS_PROXY": DEAD},
    "https_proxy": {"https_proxy": DEAD},
    "ALL_PROXY": {"ALL_PROXY": DEAD},
    "all_proxy": {"all_proxy": DEAD},
    "with NO_PROXY": {"HTTP_PROXY": DEAD, "NO_PROXY": "corp.example, .inside.example"},
    "with no_proxy": {"http_proxy": DEAD, "no_proxy": "corp.example"},
    "with both": {"HTTP_PROXY": DEAD, "no_proxy": "a.example", "NO_PROXY": "b.example"},
    "with an empty one": {"HTTP_PROXY": DEAD, "no_proxy": "", "NO_PROXY": ","},
    "with a wildcard": {"HTTP_PROXY": DEAD, "NO_PROXY": "*.corp.example"},
    "with loopback": {"HTTP_PROXY": DEAD, "NO_PROXY": "localhost,127.0.0.1"},
    "with a network": {"HTTP_PROXY": DEAD, "NO_PROXY": "10.0.0.0/8"},
}


@pytest.fixture(params=ENVIRONMENTS)
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in [*os.environ]:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    given = ENVIRONMENTS[request.param]
    for name in NAMES:  # so that they are put back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


def test_this_hosts_addresses_are_reached_without_the_proxy(environment: dict[str, str]) -> None:
    reach_own_directly()
    for host in ("127.0.0.1", "localhost"):
        assert urllib.request.proxy_bypass(host)
        assert requests.utils.should_bypass_proxies(f"http://{host}:4200/api", no_proxy=None)
        with httpx.Client() as client:
            transport = client._transport_for_url(httpx.URL(f"http://{host}:4200/api"))
            assert transport is client._transport
    assert not urllib.request.proxy_bypass("judge.example.org")
    assert {name: os.environ[name] for name in environment if name not in NAMES} == {
        name: value for name, value in environment.items() if name not in NAMES
    }
    for item in ",".join(environment.get(name, "") for name in NAMES).split(","):
        assert item.strip() in os.environ["NO_PROXY"]
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]


def test_addresses_of_nodes_are_added_to_what_was_said_before(environment: dict[str, str]) -> None:
    reach_own_directly()
    before = os.environ["NO_PROXY"].split(",")
    reach_directly(["10.1.2.3", "10.1.2.4", before[0]])
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
    assert os.environ["NO_PROXY"].split(",") == [*before, "10.1.2.3", "10.1.2.4"]
    for host in ("10.1.2.3", "10.1.2.4"):
        assert urllib.request.proxy_bypass(host)


def test_without_a_proxy_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    reach_own_directly()
    assert dict(os.environ) == before


def test_a_star_stays_alone_for_libraries_that_know_it_so() -> None:
    assert without_proxy({"NO_PROXY": "*"}, ["127.0.0.1"]) == {"no_proxy": "*", "NO_PROXY": "*"}
