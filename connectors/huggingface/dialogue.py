"""A dialogue of several turns as token ids: its opening, the messages added to it, and the parsing of turns.

Owns that text is tokenised once: generated tokens never change, and only new messages are rendered. `dialogues` makes test
dialogues that show whether a chat template rewrites earlier text. Knows nothing of engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from millrace.connectors.huggingface.response_templates import (
    IDS_OF_NINE,
    OUTSIDE,
    Template,
    family_for,
    template_for,
)
from millrace.connectors.huggingface.suffix import MARK, THOUGHT, Message, Render, suffix
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.huggingface.trained_turns import pieces
from millrace.core.contracts.rows.chat_options import PLAIN, ChatOptions
from millrace.core.contracts.rows.messages import for_template
from millrace.core.errors import ConfigError
from millrace.core.families.chat_templates import TemplateRefusedError
from millrace.core.sessions.interface import ToolCall, Turn

SHOWN_OUTSIDE = 60  # characters
SHOWN = 400  # tokens of the prompt's end, in which the parser sees what the template has already opened


@dataclass(frozen=True)
class ParsedTurn:
    """A turn's text, parsed."""

    content: str
    thinking: str
    calls: list[ToolCall]
    problem: str | None


@dataclass(frozen=True)
class TrainedDialogue:
    """A whole dialogue as token ids. The response starts with the first trained turn."""

    prompt_tokens: list[int]
    tokens: list[int]  # of the response
    mask: list[int]  # of the response; 1: trained
    text: str  # of the response, for people
    turns: int  # number of trained turns


class Dialogues:
    """The dialogues of a run. `chat`: write them by the template; otherwise texts are just concatenated."""

    def __init__(self, tokenizer: PromptTokenizer, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._family = family_for(tokenizer.tokenizer.chat_template)
        self._template: Template | None = getattr(tokenizer.tokenizer, "response_template", None) or (
            template_for(tokenizer.tokenizer.chat_template)
        )
        self._ends = ends_of(tokenizer.tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, for people and parsers."""
        text: str = self._tokenizer.tokenizer.decode(list(ids))
        return text

    def opening(self, messages: Sequence[Message], chat: bool, options: ChatOptions = PLAIN) -> list[int]:
        """Token ids of the prompt that opens a dialogue."""
        if not chat:
            return self._tokenizer.encode_opening(_joined(messages))
        return self._encode(self._renderer(options)(messages, True))

    def following(
        self,
        messages: Sequence[Message],
        ids: Sequence[int],
        chat: bool,
        options: ChatOptions = PLAIN,
        calls: Sequence[ToolCall] = (),
    ) -> list[int]:
        """Token ids of new messages, to append to a dialogue `ids` that ends with a turn. calls: of that turn.

        If the turn lacks the template's end of a turn, the ids start with it. Raises ValueError if the template refuses the messages.
        """
        if not chat:
            return self._encode(_joined(messages))
        end, text = suffix(self._renderer(options), _answering(messages, calls), self._ends)
        # gpt-oss ends its last message with the end of sequence, and others in the history with another token
        ends = (end, self._tokenizer.tokenizer.eos_token)
        ended = bool(end) and ids[-1] in self._tokenizer.tokenizer.convert_tokens_to_ids(ends)
        return self._encode(text if ended else end + text)

    def trained(
        self, messages: Sequence[Message], numbers: Sequence[int], options: ChatOptions = PLAIN
    ) -> TrainedDialogue:
        """The whole dialogue, in which the turns with these message numbers are trained.

        It is cut as a rollout grows: the text before a turn, the turn, and the text after it are tokenised separately, so that a
        trained token never holds text of others. Raises the ValueError of `pieces`, with `kind of reason: details`, and ConfigError
        if the tokenizer's texts do not join.
        """
        if not self._joins:
            raise ConfigError(
                "the tokenizer puts a space before every text, so that the turns of a dialogue cannot be cut exactly",
                where="model.tokenizer",
                remedy="name another tokenizer (in tokenizer.json: prepend_scheme never), or set loss_on=answer",
            )
        cut = pieces(self._renderer(options), for_template(messages), numbers, self._ends)
        ids = self._tokenizer.encode_texts([piece.text for piece in cut])
        later = list(zip(cut, ids, strict=True))[1:]
        return TrainedDialogue(
            prompt_tokens=list(ids[0]),
            tokens=[token for _, part in later for token in part],
            mask=[int(piece.trained) for piece, part in later for _ in part],
            text="".join(piece.text for piece, _ in later),
            turns=len(numbers),
        )

    @cached_property
    def _joins(self) -> bool:
        """Whether texts that are tokenised separately decode to their concatenation."""
        return self.decode([*self._encode("a"), *self._encode("b")]) == "ab"

    def read(self, text: str, prompt_ids: Sequence[int], options: ChatOptions = PLAIN) -> ParsedTurn:
        """Thinking, content and tool calls of a turn. If the turn cannot be parsed, all of it is content, with the problem."""
        if self._template is None:
            return ParsedTurn(self._without_end(text), "", [], None)
        from transformers.utils.chat_parsing import parse_response

        shown = self.decode(prompt_ids[-SHOWN:])
        try:
            found = parse_response(
                text, self._template, prefix=shown, tools=[*self._tools, *map(dict, options.tools)]
            )
            if found.get(OUTSIDE):
                raise ValueError(f"text outside of a channel: {found[OUTSIDE][:SHOWN_OUTSIDE]!r}")
            calls = [self._call(item, at) for at, item in enumerate(found.get("tool_calls") or [])]
        except (ValueError, KeyError, TypeError) as error:
            return ParsedTurn(self._without_end(text), "", [], str(error).partition("\n")[0])
        return ParsedTurn(found.get("content") or "", found.get("reasoning_content") or "", calls, None)

    def turn(
        self,
        output_ids: Sequence[int],
        text: str,
        truncated: bool,
        prompt_ids: Sequence[int],
        options: ChatOptions = PLAIN,
    ) -> Turn:
        """A generated turn, parsed."""
        reading = self.read(text, prompt_ids, options)
        return Turn(
            text=text,
            content=reading.content,
            output_ids=list(output_ids),
            status="truncated" if truncated else "completed",
            thinking=reading.thinking,
            tool_calls=reading.calls,
            problem=reading.problem,
        )

    def _renderer(self, options: ChatOptions) -> Render:
        return lambda messages, for_answer: self._render(messages, for_answer, options)

    def _render(self, messages: Sequence[Message], for_answer: bool, options: ChatOptions) -> str:
        try:
            return self._tokenizer.templated(
                messages,
                for_answer=for_answer,
                tools=[*self._tools, *options.tools],
                template_kwargs=options.template_kwargs,
            )
        except TemplateRefusedError as error:
            raise ValueError(f"the chat template refuses: {error.message}") from error
        except ConfigError as error:
            # one row's message may be the cause, so the error ends the rollout, not the run
            raise ValueError(str(error)) from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_texts([text])[0]

    def _call(self, item: Mapping[str, Any], at: int) -> ToolCall:
        function = item.get("function", item)
        name, arguments = str(function["name"]), function["arguments"]
        if not isinstance(arguments, Mapping):
            raise ValueError(f"the arguments of {name} are not an object")
        made = f"call{at:05d}" if self._family in IDS_OF_NINE else ""
        return ToolCall(name, dict(arguments), str(item.get("id") or made))

    def _without_end(self, text: str) -> str:
        for end in self._ends:
            text = text.removesuffix(end)
        return text


def ends_of(tokenizer: Any) -> list[str]:
    """Texts of the tokens that may end a turn: the tokenizer's special tokens, with the end of sequence first."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = [tokenizer.eos_token, *added]
    return [token for token in dict.fromkeys(special) if token]


def _joined(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content", "")) for message in messages)


def _answering(messages: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """The messages with the name and id of the call that each tool's answer is for, by position, unless it has them."""
    waiting, found = iter(calls), list[Message]()
    for message in messages:
        call = next(waiting, None) if message.get("role") == "tool" else None
        of_call = {"name": call.name, **({"tool_call_id": call.id} if call.id else {})} if call else {}
        # an id that a client chose says nothing to the policy
        kept = {key: value for key, value in message.items() if key != "tool_call_id" or not of_call.get(key)}
        found.append({**of_call, **kept})
    return found


Follows = Literal["tool", "user"]

TEXTS = {
    "plain": "It is 4.",
    "empty": "",
    "unicode": "naïve 日本 🙂 \u0301 é",
    "lines": "first\n\n  second\n",
    "marks": "a <b> {c} ]]> </s",
    "spaces": "  both ends  ",
}


def thinks_in_text(render: Render, follows: Follows) -> bool:
    """Whether a turn's thinking can only stand in its content: the template writes no reasoning_content, and asks for thinking.

    A prompt that ends with the end of thinking asks for none. Raises the template's ValueError.
    """
    asked = _user("question")
    turn: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": MARK}
    if follows == "tool":
        turn["tool_calls"] = _calls(("add", {"a": 2, "b": 2}))
    if render([asked], True).rstrip().endswith(THOUGHT):
        return False
    return MARK not in render([asked, turn], False)


def dialogues(follows: Follows, in_text: bool = True) -> dict[str, list[Message]]:
    """Dialogues of two and three turns, by name. `follows`: the role of the messages after each turn. in_text: thinking too."""
    turns: dict[str, Message] = {f"{name} text": {"content": text} for name, text in TEXTS.items()}
    turns["thinking"] = {"content": "Yes.", "reasoning_content": "Let me see.\nTwo and two."}
    turns["thinking alone"] = {"content": "", "reasoning_content": "Hm."}
    if in_text:
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
