"""The walk through the pages: a form filled in, its run, the run's artifacts, and its curves in MLflow, in a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import BaseModel

from millrace.connectors.mlflow.server import ensure_mlflow, stop_mlflow
from millrace.connectors.mlflow.traces import trace_id
from millrace.connectors.mlflow.tracker import MlflowTracker
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.core.config import RunConfig
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.reading.load import load_config
from millrace.tasks.reporting.sample_groups import samples_text
from millrace.tasks.reporting.traces import rollout_traces
from tests.support import stored_run
from tests.support.browser import open_browser
from tests.support.deployed import Deployed, flow_process
from tests.support.flow_runs import Workplace, final_weights, trained, wait_until
from tests.support.viewed_run import write_viewed_run

pytestmark = pytest.mark.slow

GRACE_MS = 5_000  # for what MLflow's pages still fetch: they ask their server all the time
ITERATIONS = 40  # more than a run makes while a page is opened and a menu found


def log_in(page: Any, address: str, login: str) -> None:
    page.goto(address)
    page.get_by_placeholder("admin:pass").fill(login)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Deployments").wait_for()


def fill(page: Any, field: str, text: str, which: int = 0) -> None:
    """Fill in the field of a name, the first of the form unless said otherwise; most are optional."""
    page.get_by_label(re.compile(rf"^{field}( \(Optional\))?$")).nth(which).fill(text)


def submit_form(
    page: Any, workplace: Workplace, root: Path, preset: str, name: str, iterations: int | None = None
) -> None:
    page.get_by_label("name", exact=True).first.wait_for()
    fill(page, "name", name)
    if iterations:
        fill(page, "iterations", str(iterations))
    fill(page, "path", str(workplace.folder / "model"))
    page.get_by_role("button", name="Add item").nth(1).click()
    fill(page, "path", str(workplace.folder / "train.jsonl"), which=1)
    small = {
        "root": str(root),
        "prompts": "8",
        "samples_per_prompt": "4",
        "max_new_tokens": "16",
        "every": "1",
    }
    for field, text in small.items():
        fill(page, field, text)
    fill(page, "function", "millrace.core.rewards.text:contains")
    page.locator("label", has_text="preset").first.click()
    page.get_by_role("option", name=preset, exact=True).click()
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**tab=Runs**")


def test_a_preset_chosen_in_the_form_is_what_the_run_trains_and_its_curves_are_shown(
    deployed: Deployed, workplace: Workplace, tmp_path: Path
) -> None:
    address = workplace.api.removesuffix("/api")
    deployment = deployed.ask("/deployments/name/train/train")["id"]
    with open_browser(*workplace.login.split(":")) as page:
        log_in(page, address, workplace.login)
        page.goto(f"{address}/v2/deployments/deployment/{deployment}/run")
        submit_form(page, workplace, tmp_path, "dapo", "from-the-form")
        (run,) = deployed.ask(
            "/flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}, "limit": 1}
        )
        given = RunConfig.model_validate(run["parameters"]["config"])
        assert given.algorithm == Algorithm(preset="dapo")
        assert given.run.name == "from-the-form"
        assert deployed.wait(run["id"]) == "COMPLETED"

        page.goto(f"{address}/v2/runs/flow-run/{run['id']}?tab=Artifacts")
        page.get_by_text("Curves of from-the-form").first.wait_for()

        said = workplace.call("ui", "from-the-form", "--root", str(tmp_path)).splitlines()
        curves = next(line.split()[1] for line in said if line.startswith("MLflow"))
        page.goto(curves)
        page.get_by_text("reward", exact=True).first.wait_for()  # the heading of the charts reward/...


def choose(page: Any, action: str, *, confirmed_by: str, seconds: int | None = None) -> None:
    """Choose an action in the menu of a flow run's page, and confirm it."""
    page.get_by_role("button", name="Open menu").first.click()
    page.get_by_role("menuitem", name=action, exact=True).click()
    if seconds is not None:
        page.get_by_label("Timeout (seconds)").fill(str(seconds))
    page.get_by_role("dialog").or_(page.get_by_role("alertdialog")).get_by_role(
        "button", name=confirmed_by, exact=True
    ).click()


def test_a_run_from_the_form_goes_on_after_pause_and_retry_as_if_nothing_had_happened(
    own_deployments: Deployed, workplace: Workplace, tmp_path: Path
) -> None:
    server, address = own_deployments, workplace.api.removesuffix("/api")
    for automation in server.ask("/automations/filter", {}):
        server.ask(f"/automations/{automation['id']}", {"enabled": False}, "PATCH")
    deployment = server.ask("/deployments/name/train/train")["id"]
    run = tmp_path / "watched"
    with open_browser(*workplace.login.split(":")) as page:
        log_in(page, address, workplace.login)
        page.goto(f"{address}/v2/deployments/deployment/{deployment}/run")
        submit_form(page, workplace, tmp_path, "grpo", "watched", iterations=ITERATIONS)
        query = {
            "deployments": {"id": {"any_": [deployment]}},
            "sort": "EXPECTED_START_TIME_DESC",
            "limit": 1,
        }
        (started,) = server.ask("/flow_runs/filter", query)
        wait_until(lambda: (run / "iterations/000001/manifest.json").exists())
        page.goto(f"{address}/v2/runs/flow-run/{started['id']}")

        process = flow_process(server)
        choose(page, "Pause", confirmed_by="Pause Flow Run", seconds=3600)
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 60)
        assert server.ask(f"/flow_runs/{started['id']}")["state_name"] == "Suspended"
        complete = len(list((run / "iterations").glob("*/manifest.json")))
        assert complete < ITERATIONS
        page.reload()
        choose(page, "Resume", confirmed_by="Resume")
        wait_until(lambda: len(list((run / "iterations").glob("*/manifest.json"))) > complete)

        flow_process(server).kill()
        server.wait_until(lambda: server.state(started["id"]) == "CRASHED")
        log = workplace.folder / "worker.log"  # it reports the end too: what is asked for before is undone
        server.wait_until(lambda: "flow_runs.worker - Check whether the flow run" in log.read_text())
        page.reload()
        choose(page, "Retry", confirmed_by="Retry")
        server.wait_until(lambda: server.state(started["id"]) != "CRASHED")  # the page asks for it
        assert server.wait(started["id"]) == "COMPLETED"
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["flow_run_id"] for attempt in attempts] == 3 * [started["id"]]
    given = started["parameters"]["config"]
    straight = server.start({**given, "storage": {"root": str(tmp_path / "straight")}})
    assert server.wait(straight) == "COMPLETED"
    assert trained(run) == trained(tmp_path / "straight/watched")
    assert final_weights(run) == final_weights(tmp_path / "straight/watched")


def test_the_form_of_a_recipe_is_filled_in_and_says_what_each_field_is(
    own_deployments: Deployed, workplace: Workplace
) -> None:
    address = workplace.api.removesuffix("/api")
    deployment = own_deployments.ask("/deployments/name/train/dapo")["id"]
    recipe = Path(__file__).parents[2] / "deployments/recipes/dapo.yaml"
    own_deployments.ask("/work_pools/local", {"is_paused": True}, "PATCH")  # so that it does not begin
    with open_browser(*workplace.login.split(":")) as page:
        log_in(page, address, workplace.login)
        page.goto(f"{address}/v2/deployments/deployment/{deployment}/run")
        page.get_by_label("name", exact=True).first.wait_for()
        assert page.get_by_label("name", exact=True).first.input_value() == "dapo"
        shown = page.locator("main").inner_text()
        for name, field in RunConfig.model_fields.items():
            assert name in shown
            section = field.annotation
            if isinstance(section, type) and issubclass(section, BaseModel):
                assert all(str(each.description) in shown for each in section.model_fields.values())
        page.get_by_role("button", name="Submit").click()
        page.wait_for_url("**tab=Runs**")
    (run,) = own_deployments.ask("/flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}})
    assert RunConfig.model_validate(run["parameters"]["config"]) == load_config(str(recipe))
    own_deployments.ask(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    own_deployments.ask("/work_pools/local", {"is_paused": False}, "PATCH")


HOST = "evil.example"
HOSTILE = (
    f"![x](http://{HOST}/a.png) <img src=http://{HOST}/c.png> <script src=http://{HOST}/d.js></script>\n"
    f"```\n![z](http://{HOST}/e.png)\n<iframe src=http://{HOST}/f></iframe> [y](http://{HOST}/g)\n"
)
BROWSERS_OWN = r"(google|googleapis|gvt1|gstatic)\.com(:443|/|$)"  # what Chromium itself asks for
FETCHED = ", ".join(
    f"{element}[{attribute}*='{HOST}']"
    for element in ("img", "script", "iframe", "video", "audio", "source", "embed", "object", "link")
    for attribute in ("src", "srcset", "href", "data")
)


@contextlib.contextmanager
def listener() -> Iterator[tuple[int, list[str]]]:
    """A server in the place of every address outside: its port, and what it was asked for."""
    asked: list[str] = []

    class Refuses(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            asked.append(self.path)
            self.send_error(502)

        do_GET = do_HEAD = do_POST = do_OPTIONS = do_CONNECT = _answer

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, asked
    finally:
        server.shutdown()
        server.server_close()


def pages_of_a_run(workplace: Workplace, samples: str) -> list[tuple[str, str]]:
    """Pages of a flow run whose log, state and samples have what a model wrote, and a text that each shows."""
    flow = workplace.ask("/flows/", {"name": "hostile"})["id"]
    state = {"type": "FAILED", "name": "Failed", "message": HOSTILE}
    run = workplace.ask("/flow_runs/", {"flow_id": flow, "name": "hostile-run", "state": state})["id"]
    made = {"key": "samples", "type": "markdown", "data": samples, "description": "x", "flow_run_id": run}
    artifact = workplace.ask("/artifacts/", made)["id"]
    line = {"name": "millrace", "level": 20, "message": HOSTILE, "flow_run_id": run}
    workplace.ask("/logs/", [{**line, "timestamp": datetime.now(UTC).isoformat()}])
    address = workplace.api.removesuffix("/api")
    return [
        (f"{address}{which}{path}", text)
        for which in ("", "/v2")
        for path, text in (
            ("/dashboard", "Flow Runs"),
            ("/runs", "hostile-run"),
            (f"/runs/flow-run/{run}?tab=Logs", HOST),
            (f"/runs/flow-run/{run}?tab=Details", "hostile-run"),
            (f"/runs/flow-run/{run}?tab=Artifacts", "hostile-run"),
            (f"/artifacts/artifact/{artifact}", HOST),
            ("/artifacts/key/samples", "samples"),
        )
    ]


@contextlib.contextmanager
def heard(login: str) -> Iterator[tuple[Any, list[str]]]:
    """A page of a browser whose every request to an address outside is heard, and what was asked for."""
    with listener() as (port, asked), open_browser(*login.split(":"), outside=port) as page:
        page.set_content(f"<img src=http://{HOST}/seen.png>")
        page.wait_for_load_state("networkidle")
        assert f"http://{HOST}/seen.png" in asked, "what a page fetches is heard"
        asked.clear()
        yield page, asked


def check_page(page: Any, asked: list[str], url: str) -> None:
    """Nothing of what a model wrote is an element of the page, and the page asked no address outside."""
    assert page.locator(FETCHED).count() == 0, url
    assert [name for name in asked if not re.search(BROWSERS_OWN, name)] == [], url


def test_no_page_of_prefect_asks_an_address_outside_or_renders_what_a_model_wrote(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_of = stored_run.sample_of
    monkeypatch.setattr(
        stored_run, "sample_of", lambda group, index, _, **more: sample_of(group, index, HOSTILE, **more)
    )
    monkeypatch.setitem(stored_run.PROMPTS, "sums", json.dumps(HOSTILE))
    samples = samples_text(stored_run.write_run(str(tmp_path)).iteration(0), "Samples", 4)
    pages = pages_of_a_run(workplace, samples)
    with heard(workplace.login) as (page, asked):
        log_in(page, workplace.api.removesuffix("/api"), workplace.login)
        for url, text in pages:
            page.goto(url)
            page.get_by_text(text).first.wait_for(state="attached")
            page.wait_for_load_state("networkidle")
            check_page(page, asked, url)


def test_no_page_of_mlflow_asks_an_address_outside_or_renders_what_a_model_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    store, login = f"sqlite:///{tmp_path / 'curves.db'}", "millrace:secret"
    tracker = MlflowTracker.start(store, "hostile", "hostile-run", "/runs/a", "a", None)
    tracker.log_params({"reward": {"options": {"text": HOSTILE}}})
    tracker.set_tags({"said": HOSTILE})
    tracker.log_metrics({"reward/mean": 0.5}, 0)
    folder = write_viewed_run(str(tmp_path / "runs"), said=(HOSTILE, HOSTILE, HOSTILE))
    traces = rollout_traces(IterationFiles(folder, 0), 16)
    tracker.log_traces(traces, 1, {trace.sample: HOSTILE for trace in traces})
    hostile = next(trace for trace in traces if HOST in str(trace.outputs["response"]))
    shown = trace_id(tracker.run_id, hostile.sample)
    try:
        address = ensure_mlflow(store, login)
        runs = f"{address}/#/experiments/{tracker.experiment_id}/runs"
        pages = [
            (address, "MLflow"),
            (runs, "hostile-run"),
            (f"{runs}/{tracker.run_id}", HOST),
            (tracker.url(), "reward"),
            (f"{runs}/{tracker.run_id}/traces", HOST),
            (f"{runs.removesuffix('runs')}traces?selectedEvaluationId={shown}", HOST),
        ]
        with heard(login) as (page, asked):
            for url, text in pages:
                page.goto(url)
                page.get_by_text(text).first.wait_for(state="attached")
                page.wait_for_timeout(GRACE_MS)
                check_page(page, asked, url)
            # of the trace that is shown: the other spans, and all attributes
            for name in ("turn", "reward"):
                page.get_by_text(name, exact=True).first.click()
                page.wait_for_timeout(GRACE_MS)
                check_page(page, asked, f"{name} of {url}")
            page.get_by_text("Attributes", exact=True).first.click()
            page.wait_for_timeout(GRACE_MS)
            check_page(page, asked, f"attributes of {url}")
    finally:
        stop_mlflow()
