"""What the warm-up of a model with tools learns from is what its rollouts will see, and calls in it can be read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from examples.warm_ups.tool_warm_up import Problem, different, turns_of
from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.tiny import TOOL_TEMPLATE, build_tiny_model, build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.config import RunConfig
from millrace.core.config.rollout import SessionSection
from millrace.core.errors import ConfigError
from millrace.core.sessions.tools import load_tools
from millrace.flows.preflight.check import check

TOOLS = SessionSection.model_validate({"tools": ["tests.support.session_functions:add"]}).tools
PROBLEM: Problem = {
    "prompt": "2+3+4",
    "label": "9",
    "dialogue": ["add(a=2,b=3)", "5", "add(a=5,b=4)", "9", "9"],
}


def test_its_rows_are_the_tokens_that_a_rollout_of_the_dialogue_has() -> None:
    schemas = [tool.schema for tool in load_tools(TOOLS).values()]
    tokenizer = PromptTokenizer(build_tokenizer(tools=True), schemas)
    dialogues = Dialogues(tokenizer, schemas)
    rows = list(turns_of(PROBLEM, schemas))
    assert [row["label"] for row in rows] == PROBLEM["dialogue"][::2]
    ids = dialogues.opening([{"role": "user", "content": PROBLEM["prompt"]}], chat=True)
    for row, answer in zip(rows, [*PROBLEM["dialogue"][1::2], ""], strict=True):
        assert tokenizer.encode_prompts([row["prompt"]], chat=False) == [ids]
        ids = ids + tokenizer.encode_response(row["label"], chat=True)
        ids = ids + dialogues.following([{"role": "tool", "content": answer}], ids, chat=True)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("add(a=2,b=3)<eos>", [("add", {"a": 2, "b": 3})], ""),
        ("9<eos>", [], "9"),
        ("so add(a=2,b=3)add(a=x)<eos>", [("add", {"a": 2, "b": 3}), ("add", {"a": "x"})], "so"),
    ],
)
def test_calls_are_read_as_the_template_writes_them(text: str, calls: list[Any], content: str) -> None:
    schemas = [tool.schema for tool in load_tools(TOOLS).values()]
    tokenizer = build_tokenizer(tools=True)
    dialogues = Dialogues(PromptTokenizer(tokenizer, schemas), schemas)
    found = dialogues.read(text, tokenizer("<user>2+3+4<assistant>")["input_ids"])
    assert [(call.name, call.arguments) for call in found.calls] == calls
    assert found.content.strip() == content
    if len(calls) == 1:
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": name, "arguments": values}} for name, values in calls],
        }
        assert tokenizer.apply_chat_template([message], tokenize=False) == f"<assistant>{text}"


def test_a_tokenizer_that_says_how_its_answers_are_read_passes_the_check(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "label": "1"}\n' * 64)

    def problems(tools: bool) -> set[str]:
        folder = build_tiny_model(tmp_path / str(tools), tools=tools)
        if not tools:  # the same template without the response_template
            (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
        values: dict[str, Any] = {
            "run": {"name": "a"},
            "model": {"path": str(folder)},
            "data": {"sources": [{"path": str(tmp_path / "rows.jsonl")}]},
            "rollout": {"session": {"tools": ["tests.support.session_functions:add"], "max_tokens": 64}},
            "reward": {"function": "millrace.core.rewards.text:exact_match"},
            "storage": {"root": str(tmp_path / "runs")},
        }
        return {f"{problem.field}: {problem.reason}" for problem in check(RunConfig.model_validate(values))}

    assert problems(True) == set()
    assert problems(False) == {"model.chat_template: how this model writes its calls of tools is not known"}


def test_problems_have_different_prompts_or_too_few_are_named() -> None:
    def make(rng: random.Random) -> Problem:
        return {"prompt": str(rng.randint(0, 9)), "label": "", "dialogue": []}

    prompts = [problem["prompt"] for problem in different(make, seed=1, count=10)]
    assert len(set(prompts)) == 10
    assert prompts == [problem["prompt"] for problem in different(make, seed=1, count=10)]
    with pytest.raises(ConfigError, match=r"run\.prepare\.options\.count = 11: only 10 of the problems"):
        different(make, seed=1, count=11)
