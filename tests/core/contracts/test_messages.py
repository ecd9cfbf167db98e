"""Messages in every form that data has them: parts of contents, empty keys, JSON text, calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.core.contracts.rows.messages import (
    NotTextError,
    message_of,
    text_of,
    text_of_answer,
)
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, parse_row
from millrace.core.sessions.completions import BadRequestError, read_messages
from millrace.core.sessions.interface import SessionError
from millrace.core.sessions.live import pieces
from millrace.core.sessions.tools import as_text
from tests.core.contracts.test_prompts import Columns

ASKED = {"role": "user", "content": "What is 3+4?"}
SUM = {"type": "text", "text": "What is 3+4?"}

TEXTS: dict[str, Any] = {  # every one is "What is 3+4?"
    "text": "What is 3+4?",
    "one part": [SUM],
    "two parts": [{"type": "text", "text": "What is "}, {"type": "text", "text": "3+4?"}],
    "an object": SUM,
    "texts": ["What is ", "3+4?"],
    "text beside a part": ["What is ", {"type": "text", "text": "3+4?"}],
    "what is sent to the Responses API": [{"type": "input_text", "text": "What is 3+4?"}],
    "what it answers": [{"type": "output_text", "text": "What is 3+4?", "annotations": [], "logprobs": []}],
    "without a type": [{"text": "What is 3+4?"}],
    "under content": [{"type": "text", "content": "What is 3+4?"}],
    "under value": [{"type": "text", "value": "What is 3+4?"}],
    "with annotations": [{"type": "text", "text": {"value": "What is 3+4?", "annotations": []}}],
    "with the keys of a table": [{"type": "text", "text": "What is 3+4?", "image_url": None, "index": None}],
    "marked for a cache": [{"type": "text", "text": "What is 3+4?", "cache_control": {"type": "ephemeral"}}],
    "an exported chat": {"content_type": "text", "parts": ["What is 3+4?"]},
    "parts of an object": {"parts": [{"text": "What is "}, {"text": "3+4?"}]},
    "a refusal": [{"type": "refusal", "refusal": "What is 3+4?"}],
    "with an empty part": [{"type": "text", "text": ""}, SUM],
    "upper case": [{"type": "TEXT", "text": "What is 3+4?"}],
    "a tuple": (SUM,),
}  # fmt: skip

NOT_TEXTS: dict[str, tuple[Any, str]] = {
    "a picture by its address": ([SUM, {"type": "image_url", "image_url": {"url": "http://x/a.png"}}], "part 1 is of type image_url"),
    "a picture": ([{"type": "image"}, SUM], "part 0 is of type image"),
    "a picture of a table": ([{"index": 0, "text": None, "type": "image"}, SUM], "part 0 is of type image"),
    "a picture for the Responses API": ([{"type": "input_image", "image_url": "x"}], "part 0 is of type input_image"),
    "a picture without a type": ([{"image": "a.png"}, SUM], "part 0 holds image"),
    "a picture beside its text": ([{"type": "text", "text": "a", "image_url": "x"}], "part 0 holds image_url"),
    "audio": ([{"type": "input_audio", "input_audio": {"data": ""}}], "part 0 is of type input_audio"),
    "a video": ([SUM, SUM, {"type": "video", "video": "a.mp4"}], "part 2 is of type video"),
    "a file": ([{"type": "file", "file": {"file_id": "f"}}], "part 0 is of type file"),
    "a document": ([{"type": "document", "source": {"data": ""}}], "part 0 is of type document"),
    "inline data": ([{"inlineData": {"mimeType": "image/png"}}], "part 0 holds inlineData"),
    "a pointer to a picture": ([{"content_type": "image_asset_pointer", "asset_pointer": "x"}], "part 0 is of type image_asset_pointer"),
    "a call": ([{"type": "tool_use", "name": "add", "input": {}}], "part 0 is of type tool_use"),
    "a call's answer": ([{"type": "tool_result", "content": "7"}], "part 0 is of type tool_result"),
    "thinking": ([{"type": "thinking", "thinking": "Hm."}], "part 0 is of type thinking"),
    "no text in a part of text": ([{"type": "text", "text": None}], "part 0 holds no text, only type"),
    "nothing in a part": ([{}], "part 0 holds no text, only nothing"),
    "a null": ([None, SUM], "part 0 is null, no object"),
    "a number": ([3], "part 0 is int, no object"),
    "an object of something else": ({"answer": 7}, "part 0 holds no text, only answer"),
}  # fmt: skip


def row(prompt: Any, **keys: Any) -> PromptRow:
    found = parse_row({"prompt": prompt}, 0, Columns(**keys))
    assert isinstance(found, PromptRow), found
    return found


def reason(prompt: Any, **keys: Any) -> str:
    found = parse_row({"prompt": prompt}, 0, Columns(**keys))
    assert isinstance(found, Quarantined), found
    return found.reason


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("name", TEXTS)
def test_parts_are_their_text_in_every_role_and_at_every_entrance(name: str, role: str) -> None:
    message = {"role": role, "content": TEXTS[name]}
    plain = {"role": role, "content": "What is 3+4?"}
    assert text_of(TEXTS[name]) == "What is 3+4?"
    answered = {"role": "assistant", "content": TEXTS[name]}
    if name != "a tuple":  # JSON has none
        assert row([message, ASKED]).prompt == [plain, ASKED]
        assert row(json.dumps([message, ASKED])).prompt == [plain, ASKED]
        trained = row([message, answered], loss_on="last_assistant").prompt
        assert trained == [plain, {"role": "assistant", "content": "What is 3+4?"}]
        assert read_messages([message, ASKED]) == [plain, ASKED]
    assert pieces(message, "user") == [plain]
    assert pieces([message, ASKED], "user") == [plain, ASKED]


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
@pytest.mark.parametrize("name", NOT_TEXTS)
def test_a_part_that_is_no_text_is_refused_by_name_at_every_entrance(name: str, role: str) -> None:
    content, why = NOT_TEXTS[name]
    message = {"role": role, "content": content}
    with pytest.raises(NotTextError, match=f"^{why}"):
        text_of(content)
    assert reason([ASKED, message]).startswith(f"not text: message 1: {why}")
    assert reason([ASKED, message], loss_on="assistant").startswith(f"not text: message 1: {why}")
    assert reason([ASKED, message], label_from_prompt=True).startswith(f"not text: message 1: {why}")
    with pytest.raises(BadRequestError, match=rf"^messages\.0\.content: {why}"):
        read_messages([message, ASKED])
    with pytest.raises(SessionError, match=f"^a message of the {role} cannot be shown: {why}"):
        pieces([ASKED, message], "user")


def test_parts_without_a_role_are_one_message_of_what_a_session_observes() -> None:
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "rains."}]
    assert pieces(parts, "tool") == [{"role": "tool", "content": "It rains."}]
    assert pieces(parts[0], "user") == [{"role": "user", "content": "It "}]
    assert pieces([], "user") == []
    with pytest.raises(SessionError, match="part 0 is of type image_url"):
        pieces([{"type": "image_url", "image_url": "x"}], "tool")
    for wrong in (3, None, [1, "a"], {1, 2}, [True]):
        with pytest.raises(TypeError, match="a prompt grows by text"):
            pieces(wrong, "user")  # type: ignore[arg-type]


ANSWERS: dict[str, tuple[Any, str]] = {
    "text": ("rain", "rain"),
    "a part": ({"type": "text", "text": "rain"}, "rain"),
    "parts": ([{"type": "text", "text": "It "}, {"type": "output_text", "text": "rains."}], "It rains."),
    "an empty part": ([{"type": "text", "text": ""}], ""),
    "a picture beside text": ([{"type": "text", "text": "Oslo"}, {"type": "image", "data": "x"}], "Oslo(image)"),
    "no parts: an object": ({"text": "rain"}, '{"text": "rain"}'),
    "no parts: other keys": ([{"type": "text", "text": "a", "score": 1}], '[{"type": "text", "text": "a", "score": 1}]'),
    "no parts: pictures alone": ([{"type": "image", "url": "a"}], '[{"type": "image", "url": "a"}]'),
    "no parts: a list of texts": (["a", "b"], '["a", "b"]'),
    "no parts: mixed": ([{"type": "text", "text": "a"}, 3], '[{"type": "text", "text": "a"}, 3]'),
    "nothing": ([], "[]"),
    "null": (None, "null"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_tool_may_answer_with_parts(name: str) -> None:
    answer, text = ANSWERS[name]
    assert as_text(answer) == text
    assert (text_of_answer(answer) is None) == (
        name.startswith("no parts") or not isinstance(answer, dict | list) or not answer
    )


NO_CALLS: dict[str, Any] = {
    "missing": {},
    "null": {"tool_calls": None},
    "an empty list": {"tool_calls": []},
    "an empty object": {"tool_calls": {}},
    "no text": {"tool_calls": ""},
    "white space": {"tool_calls": " \n"},
    "JSON's null": {"tool_calls": "null"},
    "JSON's empty list": {"tool_calls": "[]"},
    "other empty keys": {"tool_calls": [], "function_call": None, "annotations": [], "audio": None, "name": None},
    "empty metadata": {"metadata": {}, "documents": []},
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CALLS)
def test_no_calls_are_no_calls_however_they_are_written(name: str) -> None:
    said = {"role": "assistant", "content": "hello"}
    written = {**said, **NO_CALLS[name]}
    assert message_of(written) == said
    for keys in ({}, {"tools_key": "tools"}, {"loss_on": "assistant"}):
        assert row([ASKED, written, ASKED], **keys).prompt == [ASKED, said, ASKED]
    assert read_messages([ASKED, written, ASKED]) == [ASKED, said, ASKED]
    assert pieces([written], "user") == [said]
    assert reason([ASKED, {**written, "content": None}]) == "bad message: number 1: content is null"


CALL = {"type": "function", "function": {"name": "now", "arguments": {}}}


@pytest.mark.parametrize("content", [None, "", [], "missing"])
@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}, "missing"])
@pytest.mark.parametrize("as_json", [False, True])
def test_calls_without_content_or_arguments_are_one_message(
    content: Any, arguments: Any, as_json: bool
) -> None:
    function = {"name": "now"} if arguments == "missing" else {"name": "now", "arguments": arguments}
    calls: Any = [{"type": "function", "function": function}]
    said = {"role": "assistant", "tool_calls": json.dumps(calls) if as_json else calls}
    if content != "missing":
        said["content"] = content
    found = row([ASKED, said], tools_key="tools").prompt
    assert found == [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert reason([ASKED, {"role": "assistant", "tool_calls": "[{"}]).endswith(
        "its tool_calls are text that is not JSON"
    )


DIALOGUE = [{"role": "system", "content": "Be brief."}, ASKED]
SHARED = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "What is 3+4?"}]
READ: dict[str, str] = {
    "a list": json.dumps(DIALOGUE),
    "with spaces": f"\n  {json.dumps(DIALOGUE, indent=2)} \n",
    "one message": json.dumps(DIALOGUE[1:]),
    "in ShareGPT's form": json.dumps(SHARED),
    "with another key first": json.dumps([{"id": 1, "content": "Be brief.", "role": "system"}, ASKED]),
    "with parts": json.dumps([DIALOGUE[0], {"role": "user", "content": [SUM]}]),
}  # fmt: skip
KEPT: dict[str, str] = {
    "a sum": "3+4=",
    "a list of numbers": "[1, 2, 3]",
    "objects that are no messages": '[{"a": 1}]',
    "an object": json.dumps(ASKED),
    "an empty list": "[]",
    "a message and a number": '[{"role": "user", "content": "a"}, 3]',
    "a list that stands in a sentence": f"Sort {json.dumps(DIALOGUE)}",
    "a list before a sentence": '[{"a": 1}] is what?',
    "Python's objects": "[{'a': 1}]",
    "a bracket": "[{",
}  # fmt: skip
BROKEN: dict[str, str] = {
    "Python's form": str(DIALOGUE),
    "Python's form of ShareGPT's": str(SHARED),
    "cut off": json.dumps(DIALOGUE)[:-5],
    "followed by text": json.dumps(DIALOGUE) + " Answer.",
    "content first": "[{'content': 'Hi', 'role': 'user'}]",
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_messages_may_be_json_text(name: str) -> None:
    found = row(READ[name]).prompt
    assert isinstance(found, list)
    assert [(each["role"], each["content"]) for each in found] == [
        (each["role"], each["content"]) for each in (DIALOGUE[1:] if name == "one message" else DIALOGUE)
    ]
    assert row(READ[name], chat=False).prompt == READ[name]
    answered = READ[name].rstrip()[:-1] + ', {"role": "assistant", "content": "7"}]'
    if "ShareGPT" not in name:
        assert row(answered, chat=False, loss_on="assistant").prompt[-1]["content"] == "7"  # type: ignore[index]
        assert row(answered, label_from_prompt=True).label == "7"


@pytest.mark.parametrize("name", KEPT)
def test_other_text_is_a_prompt(name: str) -> None:
    assert row(KEPT[name]).prompt == KEPT[name]


@pytest.mark.parametrize("name", BROKEN)
def test_text_that_starts_as_messages_and_is_no_json_is_refused(name: str) -> None:
    why = "wrong type: the prompt is text; it starts as a list of messages does, and is not JSON"
    assert reason(BROKEN[name]).startswith(why)
    assert row(BROKEN[name], chat=False).prompt == BROKEN[name]


def test_nulls_that_an_author_wrote_stay() -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {"limit": {"default": None}}}}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "find", "arguments": {"limit": None}}}],
    }
    values = {
        "prompt": [ASKED, called],
        "tools": [tool],
        "vars": {"style": None},
        "metadata": {"level": None},
        "label": {"a": None},
    }
    found = parse_row(values, 0, Columns(tools_key="tools", chat_template_kwargs_key="vars"))
    assert isinstance(found, PromptRow)
    assert found.prompt == [ASKED, called]
    assert found.metadata == {"tools": [tool], "chat_template_kwargs": {"style": None}, "level": None}
    assert found.label == {"a": None}
    as_text = {**values, **{key: json.dumps(values[key]) for key in ("prompt", "tools", "vars", "metadata")}}
    same = parse_row(as_text, 0, Columns(tools_key="tools", chat_template_kwargs_key="vars"))
    assert same == found
