"""A dialogue of several turns as token ids: how it opens, what is added to it, and what is read in a turn.

Owns that text becomes tokens once: what was generated stays as it is, and only new messages are rendered. Knows nothing of
who generates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from millrace.connectors.huggingface.response_templates import Template, template_for
from millrace.connectors.huggingface.suffix import Message, Render, suffix
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.huggingface.trained_turns import pieces
from millrace.core.contracts.rows.chat_options import PLAIN, ChatOptions
from millrace.core.contracts.rows.trained_messages import for_template
from millrace.core.errors import ConfigError
from millrace.core.model_folder.chat_templates import TemplateRefusedError
from millrace.core.sessions.interface import ToolCall, Turn

SHOWN = 400  # characters of the prompt's end, from which a reader sees what the template has begun


@dataclass(frozen=True)
class Reading:
    """What is read in the text of a turn."""

    content: str
    thinking: str
    calls: list[ToolCall]
    problem: str | None


@dataclass(frozen=True)
class TrainedDialogue:
    """A whole dialogue as token ids. The response begins with the first trained turn."""

    prompt_tokens: list[int]
    tokens: list[int]  # of the response
    mask: list[int]  # of the response; 1: trained
    text: str  # of the response, for reading
    turns: int  # that are trained


class Dialogues:
    """The dialogues of a run. `chat`: with the template; else texts follow one another as they are."""

    def __init__(self, tokenizer: PromptTokenizer, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._template: Template | None = getattr(tokenizer.tokenizer, "response_template", None) or (
            template_for(tokenizer.tokenizer.chat_template)
        )
        self._ends = ends_of(tokenizer.tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, for reading."""
        text: str = self._tokenizer.tokenizer.decode(list(ids))
        return text

    def opening(self, messages: Sequence[Message], chat: bool, options: ChatOptions = PLAIN) -> list[int]:
        """Token ids of a prompt of its own."""
        if not chat:
            return self._tokenizer.encode_opening(_joined(messages))
        return self._encode(self._renderer(options)(messages, True))

    def following(
        self, messages: Sequence[Message], ids: Sequence[int], chat: bool, options: ChatOptions = PLAIN
    ) -> list[int]:
        """Token ids to add to a dialogue `ids`, whose last turn it ends.

        Where the turn does not end as the template ends turns, that comes first. Raises ValueError where the template refuses them.
        """
        if not chat:
            return self._encode(_joined(messages))
        end, text = suffix(self._renderer(options), messages, self._ends)
        ended = bool(end) and ids[-1] == self._tokenizer.tokenizer.convert_tokens_to_ids(end)
        return self._encode(text if ended else end + text)

    def trained(
        self, messages: Sequence[Message], numbers: Sequence[int], options: ChatOptions = PLAIN
    ) -> TrainedDialogue:
        """The whole dialogue, with the turns trained that these messages are.

        Cut as a rollout grows: what is said before a turn, the turn, and what follows it become tokens apart, so that a trained
        token never holds text of others. Raises ValueError, with `kind of reason: details`, where `pieces` does; ConfigError
        for a tokenizer whose texts do not join.
        """
        if not self._joins:
            raise ConfigError(
                "the tokenizer puts a space before every text, so that the turns of a dialogue cannot be cut exactly",
                where="model.tokenizer",
                remedy="name one that does not (in tokenizer.json: prepend_scheme never), or set loss_on=answer",
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
        """Whether texts that become tokens apart are the text that they are together."""
        return self.decode([*self._encode("a"), *self._encode("b")]) == "ab"

    def read(self, text: str, prompt_ids: Sequence[int], options: ChatOptions = PLAIN) -> Reading:
        """Thinking, content and tool calls of a turn. One that cannot be read is all content, with the problem."""
        if self._template is None:
            return Reading(self._without_end(text), "", [], None)
        from transformers.utils.chat_parsing import parse_response

        shown = self.decode(prompt_ids[-SHOWN:])
        try:
            found = parse_response(
                text, self._template, prefix=shown, tools=[*self._tools, *map(dict, options.tools)]
            )
            calls = [_call(item) for item in found.get("tool_calls") or []]
        except (ValueError, KeyError, TypeError) as error:
            return Reading(self._without_end(text), "", [], str(error).partition("\n")[0])
        return Reading(found.get("content") or "", found.get("reasoning_content") or "", calls, None)

    def turn(
        self,
        output_ids: Sequence[int],
        text: str,
        truncated: bool,
        prompt_ids: Sequence[int],
        options: ChatOptions = PLAIN,
    ) -> Turn:
        """A generated turn, read."""
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
        def render(messages: Sequence[Message], for_answer: bool) -> str:
            return self._render(messages, for_answer, options)

        return render

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
            # a message may be the cause, so it ends its rollout and not the run
            raise ValueError(str(error)) from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_texts([text])[0]

    def _without_end(self, text: str) -> str:
        for end in self._ends:
            text = text.removesuffix(end)
        return text


def ends_of(tokenizer: Any) -> list[str]:
    """Texts of the tokens that may end a turn: the tokenizer's special ones, its end of sequence first."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = [tokenizer.eos_token, *added]
    return [token for token in dict.fromkeys(special) if token]


def _joined(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content", "")) for message in messages)


def _call(item: Mapping[str, Any]) -> ToolCall:
    function = item["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {function['name']} are no object")
    return ToolCall(str(function["name"]), dict(arguments))
