"""Which reward scores a sample: of its row, of its source or set, or of the section."""

from __future__ import annotations

import pytest

from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.errors import ConfigError
from millrace.core.hooks.reward_selection import UnknownRewardError, all_rewards, own_rewards, select

TEXT = """
run: {name: a}
model: {path: m}
data: {sources: [{name: sums, path: s.jsonl, reward: "mine:sums"}, {name: other, path: o.jsonl}]}
evaluation: {sets: [{name: sums, path: t.jsonl, reward: {function: "mine:test", options: {x: 1}}}]}
reward:
  function: mine:score
  named: {code: "mine:code", both: {function: "millrace.core.rewards.format:mixture", options: {parts: PARTS}}}
"""
PARTS = "[{function: 'mine:a', weight: 2}, {function: 'mine:b'}, 'mine:c', {weight: 1}]"


def config(text: str = TEXT) -> RunConfig:
    return load_config(None, text=text.replace("PARTS", PARTS))


def test_the_row_comes_before_its_source_and_that_before_the_section() -> None:
    made = config()
    sources, sets = own_rewards(made)
    assert (sources.keys(), sets.keys()) == ({"sums"}, {"sums"})

    def function(own: str | None, **metadata: object) -> tuple[str, str]:
        found = select(made.reward, sources.get(own or ""), metadata)
        return found.field, found.function.function

    assert function("sums", reward="code") == ("reward.named.code", "mine:code")
    assert function("sums", other=1) == ("data.sources.sums.reward", "mine:sums")
    assert function("sums", reward=None) == ("data.sources.sums.reward", "mine:sums")
    assert function("other") == ("reward", "mine:score")


@pytest.mark.parametrize("name", ["codes", "mine:code", "", 1, ["code"]])
def test_a_row_that_names_no_reward_says_which_there_are(name: object) -> None:
    with pytest.raises(UnknownRewardError, match=r"reward\.named has code, both"):
        select(config().reward, None, {"reward": name})


def test_without_named_rewards_the_rows_metadata_choose_nothing() -> None:
    plain = TEXT[: TEXT.index("  named")]
    assert select(config(plain).reward, None, {"reward": "code"}).field == "reward"


def test_every_reward_is_listed_with_the_parts_of_mixtures() -> None:
    found = {each.field: each.function.function for each in all_rewards(config())}
    assert found == {
        "reward": "mine:score",
        "reward.named.code": "mine:code",
        "reward.named.both": "millrace.core.rewards.format:mixture",
        "reward.named.both.options.parts.0": "mine:a",
        "reward.named.both.options.parts.1": "mine:b",
        "reward.named.both.options.parts.2": "mine:c",
        "data.sources.sums.reward": "mine:sums",
        "evaluation.sets.sums.reward": "mine:test",
    }


def test_named_rewards_are_changed_by_name_on_the_command_line() -> None:
    changes = ["reward.named.code.options.x=1", "reward.named.both.function=mine:both"]
    named = load_config(None, changes, text=TEXT.replace("PARTS", "[]")).reward.named
    assert (named[0].options, named[1].function) == ({"x": 1}, "mine:both")


def test_a_literal_secret_in_the_options_of_any_reward_is_refused() -> None:
    for field in ("data.sources.sums.reward", "evaluation.sets.sums.reward", "reward.named.code"):
        with pytest.raises(ConfigError, match=rf"{field}.options.api_key"):
            load_config(None, [f"{field}.options.api_key=abc"], text=TEXT.replace("PARTS", "[]"))
