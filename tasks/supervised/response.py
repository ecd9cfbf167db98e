"""The trained part of a row in supervised training: its label, or the trained turns of its dialogue."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.errors import DataError
from millrace.tasks.data.rows import UsablePrompt


@dataclass(frozen=True)
class Response:
    """The tokens after a row's prompt. `mask` is 1 for tokens with a loss."""

    tokens: list[int]
    mask: list[int]
    text: str
    turns: int


def response_of(read: UsablePrompt, source: str, tokenizer: PromptTokenizer, chat: bool) -> Response:
    """The response of a usable row of a source. chat: whether the chat template writes its prompts. Raises DataError if it has
    none.
    """
    if read.dialogue is not None:
        dialogue = read.dialogue
        return Response(dialogue.tokens, dialogue.mask, dialogue.text, dialogue.turns)
    answer = read.row.label
    if not isinstance(answer, str) or not answer:
        raise DataError(
            "the label is not text; supervised training needs an answer in every row",
            where=f"source {source}, row {read.row.row}",
            remedy="set the source's label_key to the column that holds it, or loss_on=assistant for whole dialogues",
        )
    tokens = tokenizer.encode_response(answer, chat)
    return Response(tokens, [1] * len(tokens), answer, 1)
