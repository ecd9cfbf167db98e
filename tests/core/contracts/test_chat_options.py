"""Tools and variables of the chat template in a row, dialogues in ShareGPT's form, and answers at a prompt's end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.core.contracts.rows.chat_options import RESERVED, ChatOptions, chat_options
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, parse_row, require_labels
from tests.core.contracts.test_prompts import Columns

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASKED = {"role": "user", "content": "3+4="}
KEYS = Columns(tools_key="tools", chat_template_kwargs_key="variables")
ANSWERED = Columns(label_from_prompt=True)


def row(values: dict[str, Any], keys: Columns = KEYS) -> PromptRow:
    found = parse_row(values, 0, keys)
    assert isinstance(found, PromptRow), found
    return found


def reason(values: dict[str, Any], keys: Columns = KEYS) -> str:
    found = parse_row(values, 0, keys)
    assert isinstance(found, Quarantined), found
    return found.reason


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])])
@pytest.mark.parametrize("variables", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_tools_and_variables_are_read_as_objects_or_as_text_and_kept_in_metadata(
    tools: Any, variables: Any
) -> None:
    found = row({"prompt": "3+4=", "tools": tools, "variables": variables, "metadata": {"level": 1}})
    assert found.metadata == {
        "level": 1,
        "tools": [ADD],
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize("empty", [None, "", [], "[]"])
def test_a_row_may_have_no_tools_even_where_its_metadata_names_some(empty: Any) -> None:
    found = row({"prompt": "3+4=", "tools": empty, "metadata": {"tools": "a hammer"}})
    assert found.metadata["tools"] == []


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"tools": "[{"}, "wrong type: tools are text that is not JSON"),
        ({"tools": {"name": "add"}}, "wrong type: tools are dict, not a list"),
        ({"tools": [{"name": "add"}]}, "bad tool: number 0: no function.name"),
        ({"tools": ["add"]}, "bad tool: number 0: no function.name"),
        ({"variables": "on"}, "wrong type: chat_template_kwargs are text that is not JSON"),
        ({"variables": [1]}, "wrong type: chat_template_kwargs are list, not an object"),
        ({"variables": {"messages": []}}, "reserved name: messages in chat_template_kwargs"),
    ],
)
def test_what_is_wrong_with_tools_and_variables_is_said(values: dict[str, Any], why: str) -> None:
    assert reason({"prompt": "3+4=", **values}).startswith(why)


def test_arguments_of_calls_are_objects_where_a_source_has_tools() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    said = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    read = row({"prompt": said}).prompt[1]["tool_calls"][0]["function"]["arguments"]
    assert read == {"a": 3}
    kept = row({"prompt": said}, Columns()).prompt[1]["tool_calls"]
    assert kept == [call]
    call["function"]["arguments"] = "{a"
    assert reason({"prompt": said}).startswith("bad message: number 1: a tool call has no function with JSON")


def test_a_dialogue_in_the_form_of_sharegpt_becomes_messages() -> None:
    senders = ["system", "human", "gpt", "tool", "observation", "user"]
    found = row({"prompt": [{"from": sender, "value": sender} for sender in senders]}, Columns())
    assert found.prompt == [
        {"role": role, "content": sender}
        for role, sender in zip(["system", "user", "assistant", "tool", "tool", "user"], senders, strict=True)
    ]
    strange = [{"from": "human", "value": "a"}, {"from": "bing", "value": "b"}]
    assert reason({"prompt": strange}, Columns()).startswith("bad message: number 1: from is 'bing'")
    mixed = [{"from": "human", "value": "a"}, ASKED]
    assert reason({"prompt": mixed}, Columns()).startswith("bad message: number 0: role is 'None'")


def test_the_answer_at_the_end_of_a_prompt_is_the_label() -> None:
    answer = {"role": "assistant", "content": "7"}
    found = row({"prompt": [ASKED, answer], "label": "another"}, ANSWERED)
    assert (found.prompt, found.label) == ([ASKED], "7")
    found = row({"prompt": [{"from": "human", "value": "3+4="}, {"from": "gpt", "value": "7"}]}, ANSWERED)
    assert (found.prompt, found.label) == ([ASKED], "7")
    for without in ("3+4=", [ASKED]):
        assert row({"prompt": without, "label": "7"}, ANSWERED).label is None
    assert reason({"prompt": [answer]}, ANSWERED) == "empty prompt: the answer is its only message"
    assert row({"prompt": [ASKED, answer]}, Columns()).prompt == [ASKED, answer]


def test_rows_without_an_answer_are_refused_where_others_have_one() -> None:
    rows = [
        row({"prompt": [ASKED, {"role": "assistant", "content": "7"}]}, ANSWERED),
        row({"prompt": [ASKED]}, ANSWERED),
    ]
    usable, [refused] = require_labels(rows, ANSWERED)
    assert usable == rows[:1]
    assert refused.reason.startswith("no answer")


class Template:
    """What a source says of its chat template."""

    tools_key: str | None = None
    chat_template_kwargs = {"enable_thinking": False, "style": "brief"}
    chat_template_kwargs_key: str | None = None


class FromRows(Template):
    """The same, with columns."""

    tools_key = "tools"
    chat_template_kwargs_key = "variables"


def test_the_variables_of_a_row_come_before_those_of_its_source() -> None:
    metadata = {"tools": [ADD], "chat_template_kwargs": {"style": "long"}}
    assert chat_options(FromRows(), metadata) == ChatOptions(
        [ADD], {"enable_thinking": False, "style": "long"}
    )
    assert chat_options(Template(), metadata) == ChatOptions((), Template.chat_template_kwargs)
    assert chat_options(FromRows(), None) == ChatOptions((), Template.chat_template_kwargs)


def test_every_argument_of_the_renderer_is_reserved() -> None:
    import inspect

    from transformers import PreTrainedTokenizerBase

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert parameters.keys() - {"self", "kwargs"} <= RESERVED
