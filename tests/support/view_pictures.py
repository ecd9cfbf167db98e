"""Pictures of a run's views for the docs, taken in Chromium from the files that `millrace view --export` writes.

    python -m tests.support.view_pictures ROOT RUN docs/viewing [--at N] [--views conversation,tokens]

writes docs/viewing_run.png, docs/viewing_iteration.png and so on; of the sample with the best reward and the most turns.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from millrace.flows.viewer.answers import Viewer
from millrace.flows.viewer.export import exported
from tests.support.browser import open_page, running_browser

VIEWS = ("run", "iteration", "group", "conversation", "turns", "tokens")
SIZE = (1000, 760)
COLOURS = 64
MOST = 150_000  # bytes of a picture


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("run")
    parser.add_argument("prefix")
    parser.add_argument("--at", type=int, help="the iteration; the newest by default")
    parser.add_argument("--views", default=",".join(VIEWS))
    asked = parser.parse_args(arguments)
    viewer = Viewer(asked.root, asked.run)
    at = asked.at or max(viewer.of(asked.run).run.committed) + 1
    with running_browser() as browser, open_page(browser, "", "", size=SIZE) as page:
        for view in asked.views.split(","):
            data = pictured(page, viewer, at, view)
            assert len(data) < MOST, f"{view} has {len(data)} bytes"
            Path(f"{asked.prefix}_{view}.png").write_bytes(data)


def pictured(page: Any, viewer: Viewer, at: int, view: str) -> bytes:
    """A view as PNG, from an exported file."""
    assert view in VIEWS, view
    run = viewer.first
    group, sample = best(viewer, at)
    of_sample = view in VIEWS[3:]
    place = {"run": [], "iteration": [str(at)], "group": [str(at), group]}.get(view, [str(at), group, sample])
    content = exported(
        viewer,
        None if view == "run" else at,
        group if view == "group" else None,
        sample if of_sample else None,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "view.html"
        file.write_bytes(content)
        where = "/".join(quote(part, safe="") for part in ("", run, *place))
        page.goto(f"{file.as_uri()}#{where}{f'?as={view}' if of_sample else ''}")
        page.wait_for_selector("main:not(.waiting)[data-shown]")
        if of_sample:
            page.locator("#panel").wait_for()
            page.locator("#panel").scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        return small(page.screenshot())


def best(viewer: Viewer, at: int) -> tuple[str, str]:
    """The group and the sample with the best reward, of these with the most tokens."""
    (row,) = (
        viewer.of(viewer.first)
        .tables.of(at - 1, whole=True)
        .ask(
            "SELECT group_id, sample_id FROM samples WHERE verdict = 'kept' ORDER BY reward DESC, length DESC, sample_id LIMIT 1"
        )
    )
    return str(row["group_id"]), str(row["sample_id"])


def small(png: bytes) -> bytes:
    """A picture with few colours."""
    data = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS).save(data, "PNG", optimize=True)
    return data.getvalue()


if __name__ == "__main__":
    main()
