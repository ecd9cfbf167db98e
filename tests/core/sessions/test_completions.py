"""Requests and answers in OpenAI's form: every field that is read, and every one that is not taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.core.config.rollout import Sampling
from millrace.core.sessions.completions import BadRequestError, chunks, completion, read_request
from millrace.core.sessions.history import TurnKey, compared, said_by
from millrace.core.sessions.interface import ToolCall, Turn

ASKED = {"role": "user", "content": "1+1="}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}
OTHER = {"type": "function", "function": {"name": "sub", "description": "Subtract.", "parameters": {}}}
SAMPLING = Sampling(temperature=0.7, top_p=0.9).model_dump(mode="json")


def read(**body: Any) -> Any:
    return read_request({"messages": [ASKED], **body}, [TOOL, OTHER], SAMPLING)


ACCEPTED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0},
    {"temperature": None, "tools": None, "stop": None, "seed": None},
    {"n": 1, "logprobs": False, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}},
    {"tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}},
    {"model": "any", "user": "me", "metadata": {"a": 1}, "store": False},
    {"tools": [OTHER, {**TOOL, "function": {**TOOL["function"], "strict": False}}]},
    {"tools": []},
]


@pytest.mark.parametrize("body", ACCEPTED)
def test_what_changes_nothing_is_accepted(body: dict[str, Any]) -> None:
    assert read(**body).messages == [ASKED]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 1.0}, "temperature: it is 1.0, the run samples with 0.7. Leave it out, or set rollout.sampling.temperature"),
    ({"top_p": 1}, "top_p: it is 1, the run samples with 0.9"),
    ({"top_k": 5}, "top_k: it is 5"),
    ({"min_p": 0.1}, "min_p: it is 0.1"),
    ({"n": 2}, "n: it can only be 1 here, not 2"),
    ({"n": True}, "n: it can only be 1"),
    ({"logprobs": True}, "logprobs: it can only be False"),
    ({"top_logprobs": 3}, "top_logprobs: it can only be 0"),
    ({"presence_penalty": 0.5}, "presence_penalty: it can only be 0"),
    ({"frequency_penalty": 0.5}, "frequency_penalty: it can only be 0"),
    ({"repetition_penalty": 1.2}, "repetition_penalty: it can only be 1"),
    ({"min_new_tokens": 2}, "min_new_tokens: it can only be 0"),
    ({"logit_bias": {"1": 2}}, "logit_bias: it can only be {}"),
    ({"response_format": {"type": "json_object"}}, "response_format: it can only be {'type': 'text'}"),
    ({"tool_choice": "required"}, "tool_choice: it can only be 'auto'"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls: it can only be True"),
    ({"store": True}, "store: it can only be False"),
    ({"seed": 1}, "seed: it is not known here"),
    ({"tools": [TOOL]}, "tools: they are not those of rollout.session.tools"),
    ({"tools": "add"}, "tools: a list of tools is wanted"),
    ({"max_tokens": 0}, "max_tokens: a whole number from 1 to"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens: a whole number"),
    ({"max_tokens": 2**31}, "max_tokens: a whole number from 1 to 2147483647"),
    ({"max_completion_tokens": 10**400}, "max_completion_tokens: a whole number from 1 to 2147483647"),
    ({"temperature": 10**400}, "temperature: it is 1000"),
    ({"n": 10_000_000}, "n: it can only be 1 here"),
    ({"stop": [""]}, "stop: text or a list of texts"),
    ({"stop": 1}, "stop: text or a list of texts"),
    ({"stream": 1}, "stream: a boolean is wanted"),
    ({"messages": None}, "messages: a list of messages is wanted"),
    ({"messages": ["hi"]}, "messages.0: an object with a role is wanted"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages.0: an object with a role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content: part 0 is of type image_url"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: it is int, not text or parts of text"),
    ({"messages": [{"role": "user", "content": "x", "ids": [1]}]}, "messages.0.ids: token ids are not taken"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages.0.name: text is wanted"),
    ({"messages": [{**ASKED, "tool_calls": [1]}]}, "messages.0.tool_calls: a list is wanted, of the assistant"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}, ASKED]}, "messages.0.tool_calls.0: an object with a function"),
    ({"messages": [ASKED, {"role": "assistant", "content": "2"}]}, "messages: the last one is the assistant's"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "reason"), REFUSED)
def test_what_would_not_be_done_is_refused_with_its_field(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        read(**body)
    assert str(refused.value).startswith(reason), refused.value


def test_half_a_character_is_read_as_its_escape() -> None:
    asked = read(messages=[{"role": "user", "content": "half \ud83d"}])
    assert asked.messages == [{"role": "user", "content": "half \\ud83d"}]


def test_a_request_is_read() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    request = read(
        messages=[{"role": "user", "content": parts}],
        max_tokens=9,
        max_completion_tokens=5,
        stop="x",
        stream=True,
        stream_options={"include_usage": True},
    )
    assert request.messages == [ASKED]
    assert (request.max_tokens, request.stop, request.stream, request.usage) == (5, ["x"], True, True)


PLACE = TurnKey(2, 3, 0, None, (), "")
TURNS = {
    "text": Turn("2", "2", [5, 1], "completed", prompt_tokens=4),
    "cut": Turn("2", "2", [5], "truncated"),
    "thinking": Turn("", "2", [5], "completed", thinking="one and one"),
    "calls": Turn("", "", [5], "completed", tool_calls=[ToolCall("add", {"a": "ä"}), ToolCall("add", {})]),
    "unreadable": Turn("<call", "<call", [5], "completed", problem="no end"),
}
ENDED = {"text": "stop", "cut": "length", "thinking": "stop", "calls": "tool_calls", "unreadable": "stop"}


@pytest.mark.parametrize("name", TURNS)
def test_an_answer_sent_back_is_the_turn(name: str) -> None:
    answer = completion(PLACE, TURNS[name], "m", 0)
    assert answer["choices"][0]["finish_reason"] == ENDED[name]
    sent = json.loads(json.dumps(answer["choices"][0]["message"]))
    request = read(messages=[ASKED, sent, ASKED])
    assert compared(request.messages)[1].repeats(said_by(TURNS[name]))


@pytest.mark.parametrize("name", TURNS)
def test_the_chunks_of_a_stream_add_up_to_the_answer(name: str) -> None:
    answer = completion(PLACE, TURNS[name], "m", 0)
    *parts, last = chunks(answer, usage=True)
    assert (last["choices"], last["usage"]) == ([], answer["usage"])
    message: dict[str, Any] = {}
    for part in parts:
        delta = part["choices"][0]["delta"]
        for key in ("content", "reasoning_content"):
            if key in delta:
                message[key] = message.get(key, "") + delta[key]
        message.setdefault("tool_calls", []).extend(delta.get("tool_calls", ()))
    whole = answer["choices"][0]["message"]
    assert message["content"] == (whole["content"] or "")
    assert message.get("reasoning_content") == whole.get("reasoning_content")
    assert [{**call, "index": at} for at, call in enumerate(whole.get("tool_calls", ()))] == message[
        "tool_calls"
    ]
    assert parts[-1]["choices"][0]["finish_reason"] == ENDED[name]
    assert len(list(chunks(answer, usage=False))) == len(parts)


def test_ids_and_usage_follow_from_the_turns_place() -> None:
    answer = completion(PLACE, TURNS["calls"], "m", 0)
    assert answer["id"] == "chatcmpl-2-3"
    assert [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]] == [
        "call-2-3-0",
        "call-2-3-1",
    ]
    assert completion(PLACE, TURNS["text"], "m", 0)["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
    }
