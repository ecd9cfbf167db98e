"""Dialogues that show whether a chat template leaves what it wrote before alone: by what follows a turn, and what the turn holds."""

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


def dialogues(follows: Follows, thinking: bool = True) -> dict[str, list[Message]]:
    """Dialogues of two and three turns, by name, in which messages of a role follow the turns.

    thinking: also those in which a turn thinks first. What a template refuses to render of them says nothing about it.
    """
    found: dict[str, list[Message]] = {}
    for name, text in TEXTS.items():
        found[f"{follows} after {name} text"] = _dialogue(follows, {"content": text}, text)
    if thinking:
        found[f"{follows} after thinking"] = _dialogue(
            follows, {"content": "Yes.", "reasoning_content": "Let me see.\nTwo and two."}, "and?"
        )
        found[f"{follows} after thinking alone"] = _dialogue(
            follows, {"content": "", "reasoning_content": "Hm."}, "and?"
        )
    return found


def _dialogue(follows: Follows, turn: Mapping[str, Any], answer: str) -> list[Message]:
    asked: Message = {"role": "user", "content": "What is 2 + 2?"}
    if follows == "user":
        said: Message = {"role": "assistant", **turn}
        return [asked, said, {"role": "user", "content": answer or "go on"}, said, _user("again"), said]
    one, two = _calls(("add", {"a": 2, "b": 2})), _calls(("add", {"a": 4, "b": 1}), ("show", {"text": "ü\n"}))
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
