"""The walk through the pages: a form filled in, its run, the run's artifacts, and its curves in MLflow, in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from millrace.core.config import RunConfig
from millrace.core.config.algorithm import Algorithm
from tests.support.browser import open_browser
from tests.support.deployed import Deployed
from tests.support.flow_runs import Workplace

pytestmark = pytest.mark.slow


def log_in(page: Any, address: str, login: str) -> None:
    page.goto(address)
    page.get_by_placeholder("admin:pass").fill(login)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Deployments").wait_for()


def fill(page: Any, field: str, text: str, which: int = 0) -> None:
    """Fill in the field of a name, the first of the form unless said otherwise; most are optional."""
    page.get_by_label(re.compile(rf"^{field}( \(Optional\))?$")).nth(which).fill(text)


def submit_form(page: Any, workplace: Workplace, root: Path, preset: str) -> None:
    page.get_by_label("name", exact=True).first.wait_for()
    fill(page, "name", "from-the-form")
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
        submit_form(page, workplace, tmp_path, "dapo")
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
