"""Test dialogues that show whether a chat template rewrites earlier text: various turns, followed by various messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Message = Mapping[str, Any]
Follows = Literal["tool", "user"]

TEXTS = {
    "plain": "It is 4.",
    "empty": "",
    "unicode": "naïve 日本 🙂 \u0301 é",
    "lines": "first\n\n  second\n",
    "marks": "a <b> {c} ]]> </s",
    "spaces": "  both ends  ",
}


def dialogues(follows: Follows) -> dict[str, list[Message]]:
    """Dialogues of two and three turns, by name. `follows`: the role of the messages after each turn."""
    turns: dict[str, Message] = {f"{name} text": {"content": text} for name, text in TEXTS.items()}
    turns["thinking"] = {"content": "Yes.", "reasoning_content": "Let me see.\nTwo and two."}
    turns["thinking alone"] = {"content": "", "reasoning_content": "Hm."}
    turns["thinking in the text"] = {"content": "<think>\nHm.\n</think>\n\nYes."}
    found: dict[str, list[Message]] = {}
    for name, turn in turns.items():
        answer = turn["content"] or "and?"
        found[f"{follows} after {name}"] = _dialogue(follows, turn, answer, parallel=False)
        if follows == "tool":
            found[f"tools after {name}"] = _dialogue(follows, turn, answer, parallel=True)
    return found


def _dialogue(follows: Follows, turn: Message, answer: str, parallel: bool) -> list[Message]:
    """Two answered turns and a last turn. A turn with thinking in its text stands alone, without calls."""
    asked: Message = {"role": "user", "content": "What is 2 + 2?"}
    said: Message = {"role": "assistant", **turn}
    if follows == "user":
        return [asked, said, _user(answer), said, _user("again"), said]
    one = _calls(("add", {"a": 2, "b": 2}))
    two = _calls(("add", {"a": 4, "b": 1}), ("show", {"text": "ü\n"})) if parallel else one
    if "</think>" in turn["content"]:
        return [asked, said, *_answers(one, answer), said]
    return [
        asked,
        {"role": "assistant", **turn, "tool_calls": one},
        *_answers(one, answer),
        {"role": "assistant", **turn, "tool_calls": two},
        *_answers(two, answer),
        {"role": "assistant", "content": "Done."},
    ]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _calls(*calls: tuple[str, Mapping[str, Any]]) -> Sequence[Message]:
    return [
        {"type": "function", "id": f"call{n:05d}", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]


def _answers(calls: Sequence[Message], answer: str) -> list[Message]:
    return [
        {"role": "tool", "content": answer, "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in calls
    ]
