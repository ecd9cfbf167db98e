"""Addresses that must not go through a proxy of the environment: addresses of this host and of the cluster's nodes.

Prefect's client, MLflow's, a judge's and an agent's take HTTP_PROXY for every address, loopback too, which no proxy reaches.
Owns NO_PROXY in this process and its children. Other addresses go through the proxy as before.
"""

import os
import socket
from collections.abc import Iterable, Mapping

import psutil

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAMES = ("no_proxy", "NO_PROXY")  # libraries read one or the other


def reach_own_directly() -> None:
    """From now on, this process and its children ask for this host's addresses without a proxy."""
    if has_proxy():
        reach_directly([*LOOPBACK, *_of_this_host()])


def reach_directly(addresses: Iterable[str]) -> None:
    """From now on, this process and its children ask for these addresses without a proxy."""
    os.environ.update(without_proxy(os.environ, addresses))


def has_proxy() -> bool:
    """Whether the environment names a proxy."""
    return any(name.lower() in PROXIES and value for name, value in os.environ.items())


def without_proxy(environment: Mapping[str, str], own: Iterable[str]) -> dict[str, str]:
    """NO_PROXY, in capitals and not, with these addresses beside what the environment says. `*` says all already."""
    given = [item.strip() for name in NAMES for item in environment.get(name, "").split(",")]
    if "*" in given:
        return dict.fromkeys(NAMES, "*")
    return dict.fromkeys(NAMES, ",".join(dict.fromkeys(filter(None, [*given, *own]))))


def _of_this_host() -> list[str]:
    found = [
        item.address
        for items in psutil.net_if_addrs().values()
        for item in items
        if item.family == socket.AF_INET
    ]
    return [*found, socket.gethostname()]
