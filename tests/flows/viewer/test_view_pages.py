"""The pages of `millrace view` in a browser: every view in a wide and a narrow window, by keyboard, with texts that attack."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from millrace.flows.viewer.answers import Viewer
from millrace.flows.viewer.app import PAGE, application, opened
from millrace.flows.viewer.export import exported
from tests.support import view_pictures
from tests.support.attacks import ATTACKS
from tests.support.browser import open_page, running_browser
from tests.support.viewed_run import NAME, write_viewed_run

pytestmark = pytest.mark.slow

LOGIN = ("millrace", "secret")
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
SHOWN = "main[data-shown]:not(.waiting)"
SQL = "select iteration, sample_id, response from samples order by all limit 50"
# every view: its address below the run's, and a text that it shows
VIEWS: dict[str, tuple[str, str]] = {
    "run": ("", "time by task"),
    "iteration": ("/2", "zero variance"),
    "group": ("/2/kept1", "Answers side by side"),
    "sample": ("/2/kept1/kept1-0000", "calls add"),
    "tokens": ("/2/kept1/kept1-0000?as=tokens", "engine minus trainer 0.125"),
    "turns": ("/2/kept1/kept1-0000?as=turns", "critic"),
    "step": ("/-/step/2", "versions behind"),
    "account": ("/-/account", "What became of every token"),
    "account of an iteration": ("/-/account?iteration=1", "generated"),
    "timeline": ("/-/timeline", "engine-0"),
    "evaluations": ("/-/evaluations", "after 2"),
    "evaluation": ("/-/evaluations/easy/2?other=1", "1 answers have another reward"),
    "sql": (f"/-/sql?q={SQL}", "<b>6</b>"),
    "compare": ("/-/compare", "What differs in their configuration"),
}


@contextlib.contextmanager
def served(root: str) -> Iterator[str]:
    """The address of a server's page of the run."""
    with opened(None) as listener:
        server = uvicorn.Server(
            uvicorn.Config(application(Viewer(root, NAME), ":".join(LOGIN)), log_level="warning")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/{NAME}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = str(tmp_path_factory.mktemp("runs"))
    write_viewed_run(root)
    with served(root) as found:
        yield found


class Page:
    """A page in a browser, with what it complained of and what it asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: self.said.append(dialog.message))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self, address: str) -> None:
        self.page.goto(address)
        self.page.wait_for_selector(SHOWN)

    def wait_for(self, words: str) -> None:
        """Wait until these words stand in the page, whatever separates them, such as the cells of a table."""
        until = time.monotonic() + 30
        while words not in (shown := " ".join(self.page.locator("main").inner_text().split())):
            assert time.monotonic() < until, shown
            self.page.wait_for_timeout(100)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with running_browser() as found:
        yield found


@contextlib.contextmanager
def window(chromium: Any, size: str = "wide") -> Iterator[Page]:
    with open_page(chromium, *LOGIN, size=SIZES[size]) as page:
        yield Page(page)


def test_every_view_of_the_page_has_a_row() -> None:
    special = re.search(r"const SPECIAL = \{(.*?)\};", (PAGE / "main.js").read_text(), re.DOTALL)
    assert special
    assert set(re.findall(r"(\w+): \[", special[1])) <= set(VIEWS)


@pytest.mark.parametrize("size", SIZES)
def test_every_view_is_shown_and_fits_the_window(chromium: Any, address: str, size: str) -> None:
    with window(chromium, size) as seen:
        for name, (path, text) in VIEWS.items():
            seen.open(address + path)
            seen.page.locator("main", has_text=text).wait_for(timeout=30_000)
            beyond = seen.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert beyond <= 0, name
        assert seen.said == []
        assert {re.match(r"https?://[^/]+", url)[0] for url in seen.asked} == {address.rsplit("/", 1)[0]}  # type: ignore[index]


# what a person may act on: shown, and not left out of the order of the keyboard, as points of charts are, which tables have too
ACTED_ON = """[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')]
  .filter((each) => each.tabIndex >= 0 && each.checkVisibility())"""
# notes the number of each that gets the focus, and whether an outline shows it
NOTED = f"""(() => {{
  const all = {ACTED_ON};
  window.reached = [];
  document.addEventListener("focusin", ({{ target }}) => {{
    const style = getComputedStyle(target);
    window.reached.push([all.indexOf(target), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0]);
  }});
  return all.length;
}})()"""


@pytest.mark.parametrize("size", SIZES)
def test_the_keyboard_reaches_all_that_can_be_acted_on_and_shows_where_it_is(
    chromium: Any, address: str, size: str
) -> None:
    with window(chromium, size) as seen:
        for name, (path, text) in VIEWS.items():
            seen.open(address + path)
            seen.page.locator("main", has_text=text).wait_for(timeout=30_000)
            count = seen.page.evaluate(NOTED)
            assert count > 3, name
            for _ in range(count):
                seen.page.keyboard.press("Tab")
            assert seen.page.evaluate("window.reached") == [[at, True] for at in range(count)], name
        assert seen.said == []


def go_to(seen: Page, name: str) -> None:
    """Press the tabulator until the focus is on what has this text or label."""
    for _ in range(150):
        seen.page.keyboard.press("Tab")
        if name in seen.page.evaluate(
            "[document.activeElement.textContent, document.activeElement.getAttribute('aria-label'), document.activeElement.className]"
        ):
            return
    raise AssertionError(f"the keyboard does not reach {name}")


def enter(seen: Page, name: str, heading: str) -> None:
    go_to(seen, name)
    seen.page.keyboard.press("Enter")
    seen.page.get_by_role("heading", name=heading).wait_for()


def test_the_keyboard_alone_leads_from_the_run_to_a_token(chromium: Any, address: str) -> None:
    with window(chromium) as seen:
        seen.open(address)
        enter(seen, "2", "Iteration 2")
        enter(seen, "kept1", "Answers side by side")
        enter(seen, "sample 0", "What was said")
        go_to(seen, "tokens")
        seen.page.keyboard.press("Enter")
        seen.page.locator(".tokens").wait_for()
        go_to(seen, "tokens: arrow keys go from one to the next")
        seen.page.keyboard.press("End")
        assert "token 7, id" in seen.page.locator(".numbers").inner_text()
        seen.page.keyboard.press("ArrowLeft")
        assert "token 6, id" in seen.page.locator(".numbers").inner_text()
        assert seen.said == []


def test_the_keyboard_alone_works_the_other_views(chromium: Any, address: str) -> None:
    with window(chromium) as seen:
        seen.open(address)
        enter(seen, "Evaluations", "Held-out sets")
        enter(seen, "after 2", "easy, after 2 iterations")
        seen.page.get_by_label("beside those after").focus()
        seen.page.keyboard.press("ArrowDown")
        seen.page.get_by_text("1 answers have another reward").wait_for()
        enter(seen, "Timeline", "Timeline")
        go_to(seen, "zoom in")
        before = seen.page.locator("svg.timeline").inner_html()
        seen.page.keyboard.press("Enter")
        assert seen.page.locator("svg.timeline").inner_html() != before
        enter(seen, "SQL", "SQL")
        go_to(seen, "query")
        seen.page.keyboard.press("Control+a")
        seen.page.keyboard.type("select 40 + 2 as answer")
        seen.page.keyboard.press("Control+Enter")
        seen.page.get_by_role("cell", name="42", exact=True).wait_for()
        enter(seen, "Compare", "Runs side by side")
        seen.page.locator("select", has_text="hours").focus()
        seen.page.keyboard.press("ArrowDown")
        seen.page.wait_for_url("**by=tokens**")
        assert seen.said == []


# a stranger's questions: what is clicked, a link or button by its name or one in the row of a table, and what then stands there
Click = str | tuple[str, str]
QUESTIONS: dict[str, tuple[list[Click], list[str]]] = {
    "which samples got a reward without being right?": (
        ["2", ("rewarded, another answer", "reward 1")],
        ["reference answer 5 answer found 7", "reward 1"],
    ),
    "why was this group dropped?": (["2", "same1"], ["dropped: zero variance"]),
    "what did iteration 2 do differently?": (
        ["2"],
        ["What it did differently", "reward/mean 0.75 0.5 +0.25", "dropped zero variance 3 1"],
    ),
    "which step trained this sample?": (
        ["2", "kept1", "sample 0", "step that made version 2"],
        ["Step that made version 2", "versions behind"],
    ),
    "which weights generated it?": (
        ["2", "kept1", "sample 0", "weight version 1"],
        ["Step that made version 1"],
    ),
    "what did the model think?": (["2", "kept1", "sample 0", "thinking, 14 characters"], ["I need a tool."]),
    "which tool did it call, and what was the answer?": (
        ["2", "kept1", "sample 0", "turns"],
        ['calls add {"a": 2, "b": 3} answer 5'],
    ),
    "at which token do engine and trainer differ?": (
        ["2", "kept1", "sample 0", "tokens"],
        ["engine minus trainer 0.125"],
    ),
    "what became of the tokens?": (
        ["Tokens"],
        ["iteration generated trained masked dropped deferred returned 1 10 7 0 3 0 0"],
    ),
    "which held-out answers are right after 2 iterations?": (
        ["Evaluations", "after 2"],
        ["easy, after 2 iterations", "reward 1"],
    ),
}
MOST_CLICKS = 4


def test_there_are_ten_questions() -> None:
    assert len(QUESTIONS) == 10


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_in_four_clicks(chromium: Any, address: str, question: str) -> None:
    clicks, answers = QUESTIONS[question]
    assert len(clicks) <= MOST_CLICKS
    with window(chromium) as seen:
        seen.open(address)
        for click in clicks:
            _clicked(seen, click)
        for answer in answers:
            seen.wait_for(answer)


def _clicked(seen: Page, click: Click) -> None:
    page = seen.page
    if isinstance(click, tuple):
        row, name = click
        page.get_by_role("row").filter(has_text=row).get_by_role("link").filter(has_text=name).first.click()
    elif page.locator("summary", has_text=click).count():
        page.locator("summary", has_text=click).first.click()
    else:
        found = page.get_by_role("link", name=click, exact=True)
        found.or_(page.get_by_role("button", name=click, exact=True)).first.click()
    page.wait_for_selector(SHOWN)


def test_no_text_of_a_model_becomes_a_part_of_a_page(chromium: Any, tmp_path: Path) -> None:
    write_viewed_run(str(tmp_path), said=tuple(ATTACKS.values()))
    last = len(ATTACKS) - 1
    views = ["/1", "/1/kept0", f"/-/sql?q={SQL}", "/-/evaluations/easy/1", "/-/step/1"]
    views += [
        f"/1/kept0/kept0-{number:04d}?as={form}"
        for number in range(last + 1)
        for form in ("conversation", "tokens")
    ]
    with served(str(tmp_path)) as address, window(chromium) as seen:
        for path in views:
            seen.open(address + path)
            seen.page.wait_for_timeout(100)
            odd = seen.page.evaluate(
                "[...document.querySelectorAll('main img, main script, main iframe, main style, main form[action], base, "
                "main a[href^=http], main a[href^=javascript], main [onload], main [onerror]')].map((each) => each.outerHTML)"
            )
            assert odd == [], path
            assert seen.page.evaluate("window.owned") is None, path
        assert not [url for url in seen.asked if "evil" in url]
        assert seen.said == []
        seen.open(f"{address}/1/kept0")
        shown = seen.page.locator("main").inner_text()
        assert "<script>window.owned = true</script>" in shown
        assert "\\x1b]0;owned\\x07" in shown
        assert "\\u202e" in shown


def test_a_file_that_is_exported_opens_without_a_server(chromium: Any, tmp_path: Path) -> None:
    write_viewed_run(str(tmp_path), said=tuple(ATTACKS.values()))
    file = tmp_path / "group.html"
    file.write_bytes(exported(Viewer(str(tmp_path), NAME), 1, "kept0", None))
    with window(chromium) as seen:
        seen.open(file.as_uri())
        seen.page.get_by_role("link", name="sample 0", exact=True).click()
        seen.page.get_by_role("heading", name="What was said").wait_for()
        seen.page.get_by_role("button", name="tokens").click()
        seen.page.locator(".tokens span").first.wait_for()
        assert seen.page.evaluate("window.owned") is None
        assert seen.said == []
        assert seen.asked == [file.as_uri()]


def test_a_page_that_follows_shows_what_is_committed_since(chromium: Any, tmp_path: Path) -> None:
    folder = write_viewed_run(str(tmp_path))
    manifest = folder.store.read("iterations/000001/manifest.json")
    folder.store.remove("iterations/000001/manifest.json")
    with opened(None) as listener:
        viewer = Viewer(str(tmp_path), NAME, follow=True)
        server = uvicorn.Server(uvicorn.Config(application(viewer, ":".join(LOGIN)), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with window(chromium) as seen:
                seen.open(f"http://127.0.0.1:{listener.getsockname()[1]}/{NAME}")
                seen.page.get_by_role("link", name="2 (open)", exact=True).wait_for()
                folder.store.write("iterations/000001/manifest.json", manifest)
                started = time.monotonic()
                seen.page.get_by_role("link", name="2", exact=True).first.wait_for()
                assert time.monotonic() - started < 60
        finally:
            server.should_exit = True
            thread.join()


def test_the_pictures_of_the_docs_are_of_every_view_and_small(tmp_path: Path) -> None:
    write_viewed_run(str(tmp_path))
    # a process: Playwright runs once in one, and other tests of this file may have it
    command = [
        sys.executable,
        "-m",
        "tests.support.view_pictures",
        str(tmp_path),
        "seen",
        str(tmp_path / "p"),
    ]
    subprocess.run([*command, "--at", "2"], check=True)
    found = {path.stem: path.read_bytes() for path in tmp_path.glob("p_*.png")}
    assert set(found) == {f"p_{view}" for view in view_pictures.VIEWS}
    assert len(set(found.values())) == len(found)
    assert all(len(data) < view_pictures.MOST for data in found.values())
