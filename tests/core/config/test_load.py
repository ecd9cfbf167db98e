"""Reading a configuration: YAML, overrides, and everything wrong with both at once."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.config.parts.problems import Problem, render_problems
from millrace.core.config.reading.load import load_config, validate
from millrace.core.config.reading.overrides import apply
from millrace.core.config.reading.yaml_text import parse
from millrace.core.errors import ConfigError

TEXT = """
run: {name: a}
model: {path: m}
data: {sources: [{name: sums, path: s.jsonl}, {name: v1.5, path: v.jsonl}]}
trainer: {optimizer: {lr: 1e-4}}
"""


def test_numbers_in_plain_exponent_form_are_numbers() -> None:
    assert parse("a: 1e-4\nb: -2E5\nc: 1.5e3\nd: e5\ne: 12") == {
        "a": 1e-4,
        "b": -2e5,
        "c": 1500.0,
        "d": "e5",
        "e": 12,
    }


def test_merged_keys_may_be_overridden() -> None:
    assert parse("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}")["b"] == {"p": 1, "q": 3}


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("data.sources.0.weight=2", (0, "weight"), 2),
        ("data.sources.sums.weight=2", (0, "weight"), 2),
        ("data.sources.v1.5.weight=3", (1, "weight"), 3),
        ("data.sources.2.path=x.jsonl", (2, "path"), "x.jsonl"),
        ("data.sources.sums.path=a=b.jsonl", (0, "path"), "a=b.jsonl"),
    ],
)
def test_overrides_reach_into_lists(override: str, place: tuple[int, str], value: Any) -> None:
    values = parse(TEXT)
    apply(values, override)
    assert values["data"]["sources"][place[0]][place[1]] == value


def test_overrides_make_sections_and_lists_that_are_not_there() -> None:
    values: dict[str, Any] = {}
    apply(values, "data.sources.0.path=x")
    apply(values, "rollout.sampling.stop=[a, b]")
    assert values == {"data": {"sources": [{"path": "x"}]}, "rollout": {"sampling": {"stop": ["a", "b"]}}}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("x", "key=value"),
        ("=1", "key=value"),
        ("run..name=a", "key=value"),
        ("run.name.x=1", "no fields below"),
        ("data.sources.products.weight=1", "no item products; use 0, 1, sums, v1.5"),
        ("data.sources.7.weight=1", "or 2 to add one"),
        ("run.name=[", "not YAML"),
    ],
)
def test_wrong_overrides_say_what_would_be_right(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        apply(parse(TEXT), override)


def test_unknown_keys_are_answered_with_the_nearest() -> None:
    def remedy(**section: Any) -> str:
        return validate({**parse(TEXT), **section})[1][0].remedy

    assert remedy(trainer={"max_pack_token": 1}) == "did you mean max_pack_tokens?"
    assert remedy(trainer={"lr": 1}) == "did you mean trainer.optimizer.lr or algorithm.advantage.critic.lr?"
    assert remedy(storage={"zzz": 1}) == "remove it; known here: root"


def test_rules_are_asked_although_fields_are_wrong() -> None:
    text = TEXT.replace("1e-4", "fast") + "rollout: {prompts: 3, samples_per_prompt: 3}\n"
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["trainer.global_batch=2", "run.name=A", "nothing"], text=text)
    for field in ("trainer.optimizer.lr", "trainer.global_batch", "run.name", "nothing"):
        assert field in str(caught.value)


def test_a_good_text_loads() -> None:
    config = load_config(None, ["run.seed=3"], text=TEXT)
    assert (config.run.seed, config.trainer.optimizer.lr) == (3, 1e-4)


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_problems_fit_a_screen_and_none_is_left_unsaid(count: int, columns: int) -> None:
    problems = [Problem(f"a.b{n}", "v" * 500, "reason " * 20, "remedy") for n in range(count)]
    lines = render_problems(problems, rows=22, columns=columns).splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines)) <= columns
    shown = sum(line.startswith("  a.b") for line in lines)
    assert shown == count or lines[-1].startswith(f"  and {count - shown} more")
