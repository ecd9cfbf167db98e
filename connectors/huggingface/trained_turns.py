"""Cuts the chat template's text of a dialogue at the start and end of trained turns.

A trained turn is the text that the template adds to the prompt that asks for it: content, tool calls, and the token that ends the
turn. Each cut is proven: the whole text must start with the prompt, and with the prompt and the turn. A template that later
rewrites earlier turns, for example to drop their thinking, is refused. No text is searched for.
Knows nothing of tokenizers; a template is a function from messages to text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.connectors.huggingface.suffix import ASKED, Message, Render, suffix

REMEDY = "loss_on: last_assistant trains the last turn alone; model.chat_template names a template that leaves earlier turns as they were"


@dataclass(frozen=True)
class TextSpan:
    """A part of a dialogue's text, trained or not. Pieces are tokenised separately."""

    text: str
    trained: bool


def pieces(
    render: Render, messages: Sequence[Message], trained: Sequence[int], ends: Sequence[str]
) -> list[TextSpan]:
    """The dialogue's text in pieces, in order; the second piece is the first trained turn.

    trained: numbers of the trained messages. ends: texts of the tokens that may end a turn. Raises ValueError, with
    `kind of reason: details`, if the template refuses the dialogue, rewrites a turn, or ends a turn without such a token.
    """
    assert trained, "a dialogue has something to train"
    whole, at = render(messages, False), 0
    found: list[TextSpan] = []
    for number in trained:
        prompt = render(messages[:number], True)
        if not prompt:
            raise ValueError(f"no prompt: nothing comes before message {number}, which is trained")
        if not whole.startswith(prompt):
            raise ValueError(
                f"rewritten turn: the chat template writes the text before message {number} differently than in the prompt "
                f"that asks for it; {REMEDY}"
            )
        turn, beyond = _turn(render, messages, number, prompt, whole, ends)
        assert at <= len(prompt), "turns follow one another"
        found += [TextSpan(whole[at : len(prompt)], False), TextSpan(turn, True)]
        at = len(prompt) + len(turn) - beyond
    rest = whole[at:]
    return [*found, *([TextSpan(rest, False)] if rest else [])]


def _turn(
    render: Render, messages: Sequence[Message], number: int, prompt: str, whole: str, ends: Sequence[str]
) -> tuple[str, int]:
    """The text of a turn with the token that ends it, and the number of its characters that the whole text lacks."""
    said = render(messages[: number + 1], False)
    turn = said[len(prompt) :]
    ended = any(end and turn.rstrip().endswith(end) for end in ends)
    if ended:
        turn = turn.rstrip()
    if not (said.startswith(prompt) and whole.startswith(prompt + turn)):
        raise ValueError(
            f"rewritten turn: the chat template writes message {number} differently once others follow; {REMEDY}"
        )
    if ended:
        return turn, 0
    # in some templates, such as GLM's, the next message's first token ends the turn
    rest = whole[len(prompt) + len(turn) :]
    gap = len(rest) - len(rest.lstrip("\n"))
    end = next((end for end in ends if end and rest[gap:].startswith(end)), "")
    if end:
        return turn + rest[: gap + len(end)], 0
    end = "" if rest else suffix(render, [ASKED], ends)[0]
    if not end:
        raise ValueError(
            f"endless turn: the chat template ends message {number} with no special token, so that a model would not learn "
            "to end; have it write eos_token after each message of the assistant"
        )
    return turn + end, len(end)
