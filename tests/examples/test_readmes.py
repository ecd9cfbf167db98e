"""The page of every example says how it is started, how long that takes and what to expect, and shows what comes out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.levels.growing import sums
from millrace import RewardInput
from millrace.core.hooks.reward_forms import answer_of, reward_of
from millrace.core.rewards.scoring import read_group, read_score

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
NUMBER = r"(?:a|an|one|two|three|four|five|six|seven|eight|nine|ten|\d[\d.,]*)(?: and a half)?"
TIME = re.compile(rf"\b{NUMBER} (?:seconds?|minutes?|s)\b")
NO_TIME = {"puzzles"}
NO_SAMPLE = {
    "advantage",
    "distillation_served",
    "generation",
    "loss",
    "puzzles",
    "reuse",
}


def page(folder: str) -> str:
    return (EXAMPLES / folder / "README.md").read_text()


def blocks(text: str, languages: Sequence[str]) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for language, code in found if language in languages]


def samples(folder: str) -> list[str]:
    return blocks(page(folder), ("", "text", "json"))


def expected(folder: str) -> str:
    """What a page says from `What to expect` on, before it shows its files."""
    _, found, rest = page(folder).partition("What to expect:")
    assert found, "no paragraph begins with What to expect"
    return re.split(r"```(?:python|yaml)", rest)[0]


def test_every_folder_has_a_page() -> None:
    assert sorted({path.parent.name for path in EXAMPLES.glob("*/*.yaml")}) == FOLDERS


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_page_starts_with_the_command(folder: str) -> None:
    commands = blocks(page(folder), ("sh",))
    configs = sorted((EXAMPLES / folder).glob("*.yaml"))
    # of several, each part of the page begins with its own
    for first, config in zip(commands, configs, strict=False):
        assert f"cd examples/{folder}\n" in first
        assert f"millrace train {config.name}\n" in first
    assert len(commands) >= len(configs) > 0


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_page_says_what_to_expect_with_a_number(folder: str) -> None:
    assert re.search(r"\d", TIME.sub("", expected(folder)))


@pytest.mark.parametrize("folder", sorted({*FOLDERS} - NO_TIME))
def test_a_page_says_how_long_it_takes(folder: str) -> None:
    assert TIME.search(expected(folder))


@pytest.mark.parametrize("folder", sorted({*FOLDERS} - NO_SAMPLE))
def test_a_page_shows_what_comes_out(folder: str) -> None:
    assert samples(folder)


@pytest.mark.parametrize("folder", ["reward", "group_reward", "tournament"])
def test_what_a_reward_is_shown_to_give_is_what_it_gives(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    [config] = (EXAMPLES / folder).glob("*.yaml")
    reward = yaml.safe_load(config.read_text())["reward"]
    shown = [line.split("  ", 1) for line in samples(folder)[0].splitlines()]
    given = [
        RewardInput("48+17=", said.strip(), "65", response_length=len(said.strip()) + 1) for said, _ in shown
    ]
    function = reward_of(reward["function"], reward.get("options", {}))
    if reward.get("group"):
        found = read_group(answer_of(function, given), len(given), folder)
    else:
        found = [read_score(answer_of(function, each), folder) for each in given]
    for score, (_, text) in zip(found, shown, strict=True):
        wanted: dict[str, Any] = json.loads(text)
        assert {"reward": score.reward, **score.parts} == pytest.approx(wanted, abs=0.005)


def test_the_prompts_that_levels_shows_are_of_their_levels() -> None:
    for line in samples("levels")[0].splitlines():
        level, prompt = line.split()
        rows = sums(int(level))
        assert prompt in {rows[number]["prompt"] for number in range(len(rows))}
        assert int(level) == 0 or prompt not in {
            row["prompt"] for row in map(sums(int(level) - 1).__getitem__, range(len(sums(int(level) - 1))))
        }
