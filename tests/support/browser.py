"""A real browser without a window, for tests of pages as a person sees them. It is Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

PATIENCE_MS = 120_000
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def running_browser(outside: int | None = None) -> Iterator[Any]:
    """A browser. Fails the test, saying what to install, where there is none.

    outside: port of this host that every request to an address outside goes to, instead of the network.
    """
    try:
        from playwright import sync_api
    except ImportError:
        pytest.fail("no playwright: pip install 'millrace[browser]'", pytrace=False)
    if CHROMIUM is None:
        pytest.fail("no Chromium: apt install chromium", pytrace=False)
    with sync_api.sync_playwright() as driver:
        # given to Chromium itself: by Playwright's own option requests to this host would go there too
        proxy = [f"--proxy-server=http://127.0.0.1:{outside}"] if outside else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *proxy])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def open_page(browser: Any, user: str, password: str, size: tuple[int, int] = (1440, 1200)) -> Iterator[Any]:
    """A page that has the user's login for servers that ask by HTTP, and nothing of earlier pages. size: of the window."""
    login = {"username": user, "password": password}
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, http_credentials=login)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    try:
        yield page
    finally:
        context.close()


@contextlib.contextmanager
def open_browser(user: str, password: str, *, outside: int | None = None) -> Iterator[Any]:
    """A page of a browser of its own. Arguments: of `open_page` and `running_browser`."""
    with running_browser(outside) as browser, open_page(browser, user, password) as page:
        yield page
