"""One HTML file of a sample, a group, an iteration or a run, that opens anywhere and loads nothing.

Owns which answers go in. They lie in the file as JSON that no browser can read as a page, and the scripts are the server's.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

from millrace.core.errors import ConfigError, StorageError
from millrace.flows.viewer.answers import Viewer, as_json
from millrace.flows.viewer.app import INDEX, PAGE, SCRIPTS, STYLE

Question = tuple[str, dict[str, str]]


def exported(viewer: Viewer, iteration: int | None, group: str | None, sample: str | None) -> bytes:
    """The file. iteration: from 1; without it the run. Raises ConfigError without the iteration of a group or sample.

    Raises StorageError for what is missing or broken at the asked place; what lies below it is left out then.
    """
    if iteration is None and (group or sample):
        raise ConfigError("needs its iteration", where="--group, --sample", remedy="give --at too")
    run = viewer.first
    place = [run, *([str(iteration)] if iteration is not None else [])]
    if sample:
        group = viewer.of(run).samples.group_of((iteration or 1) - 1, sample)
    place += [part for part in (group, sample) if part]
    answers: dict[str, Any] = {}
    for number, (what, values) in enumerate(_questions(viewer, run, iteration, group, sample)):
        try:
            answers[_key(run, what, values)] = viewer.ask(run, what, values)
        except StorageError:
            if not number:
                raise
    first = "/" + "/".join(quote(part, safe="") for part in place)
    return _page({"first": first, "answers": answers}, " · ".join(["millrace", *place]))


def _questions(
    viewer: Viewer, run: str, iteration: int | None, group: str | None, sample: str | None
) -> Iterator[Question]:
    """What the shown pages ask, the asked place's first."""
    if iteration is None:
        yield "overview", {}
        return
    at = {"iteration": str(iteration)}
    if sample:
        yield from _of_sample(at, sample)
        return
    if group:
        yield from _of_group(viewer, run, at, group)
        return
    yield "iteration", at
    for each in viewer.ask(run, "iteration", at).groups:
        yield "group", {**at, "group": each["group_id"]}


def _of_group(viewer: Viewer, run: str, at: dict[str, str], group: str) -> Iterator[Question]:
    yield "group", {**at, "group": group}
    for answer in viewer.ask(run, "group", {**at, "group": group}).answers:
        yield from _of_sample(at, answer.sample)


def _of_sample(at: dict[str, str], sample: str) -> Iterator[Question]:
    for what in ("sample", "lineage", "tokens", "turns"):
        yield what, {**at, "sample": sample}


def _key(run: str, what: str, values: dict[str, str]) -> str:
    """How the page names a question: as `ask` of dom.js does."""
    return f"{run}/{what}?{urlencode(sorted(values.items()))}"


def _page(stored: dict[str, Any], title: str) -> bytes:
    scripts = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (PAGE / STYLE).read_text(encoding="utf-8")
    assert "</script" not in scripts.lower()
    assert "</style" not in style.lower()
    # in JSON these characters stand within texts alone, where their escapes mean the same
    data = as_json(stored).replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    policy = f"default-src 'none'; img-src data:; script-src {_hash(scripts)}; style-src {_hash(style)}; base-uri 'none'"
    page = (PAGE / INDEX).read_text(encoding="utf-8")
    body = page[page.index("<body>") : page.index("<script")]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{style}</style>\n</head>\n"
    )
    # a script without a type that browsers run is data
    held = b'<script type="application/json" id="stored">' + data + b"</script>\n"
    end = f"<script>{scripts}</script>\n</body>\n</html>\n"
    return head.encode() + body.encode() + held + end.encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
