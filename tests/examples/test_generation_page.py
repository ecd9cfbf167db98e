"""The code of the page about generation runs as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace import Session, Task
from millrace.core.config import RunConfig
from millrace.core.config.rollout import SessionSection as Settings
from millrace.core.sessions.forms import act_in
from millrace.core.sessions.interface import Turn
from millrace.core.sessions.live import LiveSession, Shared
from millrace.core.sessions.pipe import CallTool, Generate, MakeCall, Noted, Reply, Request
from millrace.core.sessions.tools import LoadedTool
from tests.examples.test_pages import ROOT, blocks

PAGE = ROOT / "docs" / "generation.md"


def modules() -> dict[str, dict[str, Any]]:
    """Names of each module of the page, which says its file in the first line."""
    found: dict[str, dict[str, Any]] = {}
    for block in blocks(PAGE, "python"):
        if block.startswith("from openai"):  # a package that the tests do not need
            continue
        names: dict[str, Any] = {"__name__": block.partition(".py")[0].removeprefix("# ")}
        exec(block, names)
        found[names["__name__"]] = names
    return found


class Answers:
    """A session whose policy says these texts in turn."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.rewards: dict[int, Any] = {}
        self.asked: list[Request] = []

    async def ask(self, request: Request) -> Reply:
        self.asked.append(request)
        match request:
            case Generate():
                text = self.texts.pop(0)
                return Turn(text, text, [1], "completed")
            case CallTool():
                return MakeCall(0)
        return Noted()

    def session(self) -> LiveSession:
        shared = Shared(
            task=Task("2+2", "4"),
            messages=[],
            seed=7,
            ask=self.ask,
            make_call=_nothing,
            serve=lambda session: ("", ""),
            timeout_s=5.0,
            sampling={},
            over=lambda: None,
        )
        self.rewards = shared.rewards
        return LiveSession(shared)


async def _nothing(tool: str, arguments: Any) -> str:
    return ""


@pytest.mark.parametrize(("texts", "reward"), [(["4"], 1.0), (["5", "4"], 0.5), (["5", "6"], 0.0)])
async def test_a_second_try_is_worth_less(texts: list[str], reward: float) -> None:
    answers = Answers(*texts)
    assert await modules()["play"]["second_try"](answers.session()) == reward
    assert answers.texts == []


async def test_the_environment_leads_to_its_number_from_a_snapshot_too() -> None:
    guess = modules()["guess"]["Guess"]
    first = guess(top=8)
    await first.reset(Task("2+2"))
    answers = Answers("0", "9", str(first.number))
    result = await act_in(answers.session(), guess, top=8)
    assert result is not None
    assert result.reward == 1.0
    other = guess()
    other.restore(first.snapshot())
    assert other.number == first.number
    shown = [piece["content"] for request in answers.asked for piece in getattr(request, "new", ())]
    assert shown[0] == "Guess a number below 8."
    assert set(shown[1:]) <= {"higher", "lower"}


async def test_the_critic_is_paid_for_seeing_what_is_right() -> None:
    answers = Answers("4", "Yes.")
    await modules()["debate"]["solve_and_judge"](answers.session())
    assert {number: given["reward"] for number, given in answers.rewards.items()} == {0: 1.0, 1: 1.0}
    assert answers.asked[1].start.name == "critic"


async def test_the_tool_is_shown_as_the_page_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (block,) = (block for block in blocks(PAGE, "python") if block.startswith("# tools.py"))
    (tmp_path / "page_tools.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = Settings.model_validate({"tools": ["page_tools:add"]})
    tool = LoadedTool(settings.tools[0], "rollout.session.tools.0")
    assert await tool({"a": 2, "b": 3}) == "5"
    parameters = tool.schema["function"]["parameters"]
    assert parameters["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert parameters["required"] == ["a", "b"]


def test_the_configurations_of_the_page_are_valid() -> None:
    whole, *parts = (yaml.safe_load(block) for block in blocks(PAGE, "yaml"))
    for part in parts:
        config = {**whole, **{name: value for name, value in part.items() if name != "rollout"}}
        config["rollout"] = {**whole["rollout"], "session": part["rollout"]["session"]}
        assert RunConfig.model_validate(config).rollout.session
    assert RunConfig.model_validate(whole).rollout.session


def test_what_a_session_has_is_in_the_table() -> None:
    public = {name for name in vars(Session) if not name.startswith("_")}
    table = PAGE.read_text().split("| `session` has")[1].split("\n\n")[0]
    assert public == {
        name for name in public if f"`{name}" in table or f"await {name}(" in table or f"`{name}`" in table
    }
