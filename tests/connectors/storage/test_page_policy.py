"""Pages of the local servers ask no address outside, and the policy that says so leaves them what they need."""

from __future__ import annotations

from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from millrace.connectors.host.local_server import HEADER, POLICY, SOURCES, OwnAddressesOnly

# none of them is an address that another machine has
INSIDE = {
    *("'self'", "'none'", "data:", "blob:", "ws://127.0.0.1:*", "ws://localhost:*"),
    *("'unsafe-inline'", "'unsafe-eval'"),
}
FETCHES = {
    *("default-src", "script-src", "style-src", "img-src", "font-src", "media-src", "worker-src"),
    *("connect-src", "frame-src", "object-src", "base-uri", "form-action"),
}
PAGES = ("prefect/server/ui", "prefect/server/ui-v2", "mlflow/server/js/build")


def folder(page: str) -> Path:
    package, _, inside = page.partition("/")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / inside


class Assets(HTMLParser):
    """The addresses that a page names, and the scripts that stand in it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.addresses += [value for name in ("src", "href") if (value := named.get(name))]
        self.inline += tag == "script" and not named.get("src")
        self.inline += sum(name.startswith("on") for name in named)


def test_the_policy_names_no_address_outside() -> None:
    assert set(SOURCES) == FETCHES
    assert {source for sources in SOURCES.values() for source in sources.split()} <= INSIDE
    assert "'unsafe-inline'" not in SOURCES["script-src"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_needs_only_what_the_policy_leaves_it(page: str) -> None:
    assets = Assets()
    assets.feed((folder(page) / "index.html").read_text())
    assert len(assets.addresses) > 3
    assert not [address for address in assets.addresses if urlsplit(address)[:2] != ("", "")]
    assert assets.inline == 0


@pytest.mark.parametrize("kind", ["http.response.start", "http.response.body", "websocket.accept"])
async def test_an_answer_carries_the_policy_once_beside_its_own_headers(kind: str) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": kind, "headers": [(b"content-type", b"text/html")]})

    async def receive() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    await OwnAddressesOnly(app)({"type": "http"}, receive, send)
    policy = [(HEADER, POLICY.encode())] if kind == "http.response.start" else []
    assert sent == [{"type": kind, "headers": [(b"content-type", b"text/html"), *policy]}]
