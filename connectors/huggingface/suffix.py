"""What a chat template writes for the messages that follow a turn, and whether that is all it changes.

A dialogue of several turns grows by suffixes: the tokens so far stay, and only what is new is rendered. That is what the
template itself would send as long as it leaves what it wrote before alone: `first_difference` looks for a dialogue in which
it does not. Knows nothing of tokenizers; a template is a function from messages to text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]
MARK = "9f3c-turn"  # stands for a turn; no template writes it
THOUGHT = "</think>"
ASKED: Message = {"role": "user", "content": "question"}
CALLED = {"type": "function", "function": {"name": "tool", "arguments": {}}}


class Render(Protocol):
    """A chat template. Raises ValueError with its message where it refuses."""

    def __call__(self, messages: Sequence[Message], for_answer: bool) -> str: ...


def suffix(render: Render, new: Sequence[Message], ends: Sequence[str]) -> tuple[str, str]:
    """The text that ends a turn, and the text after it: the new messages and what begins the next turn.

    ends: texts of the tokens that may end a turn. The first is empty where the template ends turns otherwise.
    Raises ValueError where the template takes no such messages after a turn.
    """
    tail = _after_turn(render, new, ends)
    end = next((end for end in ends if end and tail.lstrip("\n").startswith(end)), "")
    return end, tail.lstrip("\n").removeprefix(end) if end else tail


def turn_end(render: Render, ends: Sequence[str]) -> str | None:
    """The token by which a template ends a turn. None if it has none, or takes no message after a turn."""
    try:
        return suffix(render, [ASKED], ends)[0] or None
    except ValueError:
        return None


def _after_turn(render: Render, new: Sequence[Message], ends: Sequence[str]) -> str:
    turn: Message = {"role": "assistant", "content": MARK}
    try:
        text = render([ASKED, turn, *new], True)
    except ValueError:
        if new[0].get("role") != "tool":
            raise
        return _after_call(render, new, ends)  # it takes a tool's answer after a call alone
    _, found, tail = text.rpartition(MARK)
    if not found:
        raise ValueError("it leaves out what the policy said")
    return tail


def _after_call(render: Render, new: Sequence[Message], ends: Sequence[str]) -> str:
    """The same after a turn that calls as many tools as answer: the text without them is cut off."""
    calls = [CALLED] * sum(message.get("role") == "tool" for message in new)
    base = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    before, text = render(base, False).rstrip("\n"), render([*base, *new], True)
    if not text.startswith(before):
        raise ValueError("what it writes of a call depends on what follows")
    return next((end for end in ends if end and before.endswith(end)), "") + text[len(before) :]


@dataclass(frozen=True)
class Difference:
    """Where the template's own text leaves the one that grew by suffixes."""

    dialogue: str  # its name
    grown: str  # both from shortly before the first character that differs
    rendered: str


def first_difference(
    render: Render, dialogues: Mapping[str, Sequence[Message]], ends: Sequence[str]
) -> Difference | None:
    """The first dialogue that the template renders otherwise than it grew. None if there is none.

    Each begins with messages of others and alternates from then on: a turn of the assistant, messages of others. One that the
    template refuses says nothing. Raises ValueError, as the template does, if it refuses all.
    """
    refused: ValueError | None = None
    for number, (name, dialogue) in enumerate(dialogues.items()):
        try:
            found = _difference(render, name, dialogue, ends)
        except ValueError as error:
            refused = error if number == 0 or refused else None
            continue
        refused = None
        if found:
            return found
    if refused:
        raise refused
    return None


def _difference(
    render: Render, name: str, dialogue: Sequence[Message], ends: Sequence[str]
) -> Difference | None:
    cuts = [at for at, message in enumerate(dialogue) if message["role"] == "assistant"]
    grown = render(dialogue[: cuts[0]], True)
    for at, following in zip(cuts, cuts[1:], strict=False):
        sent = render(dialogue[:at], True)
        end, tail = suffix(render, dialogue[at + 1 : following], ends)
        content = str(dialogue[at].get("content"))
        # a turn that is given as it was generated, thinking and all, else as the template writes it
        raw = content if THOUGHT in content else render(dialogue[: at + 1], False).removeprefix(sent)
        grown += raw.rstrip("\n").removesuffix(end) + end + tail if end else raw + tail
        rendered = render(dialogue[:following], True)
        if grown != rendered:
            pairs = enumerate(zip(grown, rendered, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(grown), len(rendered)))
            return Difference(name, grown[first:], rendered[first:])
    return None
