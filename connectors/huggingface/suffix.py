"""Renders the messages that follow a turn by a chat template, and checks that the template does not rewrite earlier text.

A dialogue of several turns grows by suffixes: earlier tokens stay, and only new messages are rendered. This equals the template's
text of the whole dialogue if the template never changes earlier text: `first_difference` looks for a dialogue in which it does.
Knows nothing of tokenizers; a template is a function from messages to text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]
MARK = "9f3c-turn"  # placeholder for a turn, which no template writes
THOUGHT = "</think>"
ASKED: Message = {"role": "user", "content": "question"}


class Render(Protocol):
    """A chat template. Raises ValueError with the template's message if it refuses."""

    def __call__(self, messages: Sequence[Message], for_answer: bool) -> str: ...


def suffix(render: Render, new: Sequence[Message], ends: Sequence[str]) -> tuple[str, str]:
    """The text that ends a turn, and the text after it: the new messages and the start of the next turn.

    ends: texts of the tokens that may end a turn. If the template ends turns in another way, the first text is empty.
    Raises ValueError if the template does not accept such messages after a turn.
    """
    tail = _after_turn(render, new, ends)
    end = next((end for end in ends if end and tail.lstrip("\n").startswith(end)), "")
    return end, tail.lstrip("\n").removeprefix(end) if end else tail


def turn_end(render: Render, ends: Sequence[str]) -> str | None:
    """The token by which a template ends a turn. None if it has none, or accepts no message after a turn."""
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
        return _after_call(render, new, ends)  # the template accepts a tool's answer only after a call
    _, found, tail = text.rpartition(MARK)
    if not found:
        raise ValueError("it leaves out what the policy said")
    return tail


def _after_call(render: Render, new: Sequence[Message], ends: Sequence[str]) -> str:
    """The same after a turn with a call for each tool's answer: renders with and without the answers, and cuts the common text."""
    calls = [_answered(message) for message in new if message.get("role") == "tool"]
    base = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    before, text = render(base, False).rstrip("\n"), render([*base, *new], True)
    if not text.startswith(before):
        raise ValueError("what it writes of a call depends on what follows")
    return next((end for end in ends if end and before.endswith(end)), "") + text[len(before) :]


def _answered(message: Message) -> Message:
    """The call that a tool's answer is for, without its arguments."""
    function = {"name": message.get("name", "tool"), "arguments": {}}
    return {"type": "function", "id": message.get("tool_call_id", ""), "function": function}


@dataclass(frozen=True)
class Difference:
    """The first difference between the template's text of a dialogue and the text that grew by suffixes."""

    dialogue: str  # its name
    grown: str  # both texts, from the first character that differs
    rendered: str


def first_difference(
    render: Render, dialogues: Mapping[str, Sequence[Message]], ends: Sequence[str]
) -> Difference | None:
    """The first dialogue whose rendered text differs from the text that grew by suffixes. None if all are equal.

    Each dialogue starts with messages of others; then turns of the assistant and messages of others alternate. Skips dialogues that
    the template refuses. Raises the template's ValueError if it refuses all.
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
        # a turn with thinking in its text was generated in this form; others take the template's form
        raw = content if THOUGHT in content else render(dialogue[: at + 1], False).removeprefix(sent)
        grown += raw.rstrip("\n").removesuffix(end) + end + tail if end else raw + tail
        rendered = render(dialogue[:following], True)
        if grown != rendered:
            pairs = enumerate(zip(grown, rendered, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(grown), len(rendered)))
            return Difference(name, grown[first:], rendered[first:])
    return None
