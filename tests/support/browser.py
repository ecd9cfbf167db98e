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
def open_browser(user: str, password: str) -> Iterator[Any]:
    """A page of a browser that has the user's login for servers that ask by HTTP. Skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        login = {"username": user, "password": password}
        page = browser.new_context(
            viewport={"width": 1440, "height": 1200}, http_credentials=login
        ).new_page()
        page.set_default_timeout(PATIENCE_MS)
        try:
            yield page
        finally:
            browser.close()
