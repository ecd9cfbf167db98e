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
def open_browser(
    user: str, password: str, *, outside: int | None = None, size: tuple[int, int] = (1440, 1200)
) -> Iterator[Any]:
    """A page of a browser that has the user's login for servers that ask by HTTP. Skips the test where there is none.

    outside: port of this host that every request to an address outside goes to, instead of the network. size: of the window.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt install chromium")
    with playwright.sync_playwright() as driver:
        # given to Chromium itself: by Playwright's own option requests to this host would go there too
        proxy = [f"--proxy-server=http://127.0.0.1:{outside}"] if outside else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *proxy])
        login = {"username": user, "password": password}
        page = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, http_credentials=login
        ).new_page()
        page.set_default_timeout(PATIENCE_MS)
        try:
            yield page
        finally:
            browser.close()
