"""Where an answer ends: at which tokens an engine stops, whatever a model's files say.

The token that ends a turn stands in the chat template, the end of sequence in the tokenizer, and what engines stop at in
generation_config.json or config.json. Models are published, and made by training, in which they differ: an answer would
then go on to its last token. Owns what a request has to name for them to agree, for every engine alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.contracts.rows.own_sampling import SAMPLING, STOP, STOP_IDS
from millrace.core.errors import EngineError
from millrace.core.plain_text import whole


@dataclass(frozen=True)
class AnswerEnds:
    """Ids of the tokens that end an answer."""

    engine: tuple[int, ...] = ()  # at which engines stop by the model's files
    turn: int | None = None  # that ends a turn, as the chat template writes it
    eos: int | None = None  # the tokenizer's end of sequence
    special: Mapping[str, int] = field(
        default_factory=dict
    )  # special tokens by their texts, which no answer's text has

    @property
    def added(self) -> list[int]:
        """What the model's files do not name: requests name it, and so does an export."""
        named = (token for token in (self.turn, self.eos) if token is not None)
        return [token for token in dict.fromkeys(named) if token not in self.engine]

    @property
    def named(self) -> dict[str, list[int]]:
        """The tokens that the model's files name, and those that requests name beside them."""
        return {"model": list(self.engine), "requests": self.added}

    def trained(self, chat: bool) -> int | None:
        """The token that ends a reference answer. chat: the prompt is written by the chat template."""
        return self.turn if chat and self.turn is not None else self.eos

    def stops(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What a request's `stop` and `stop_token_ids` become. A text that is a special token is its id, for every engine alike.

        Raises EngineError for a text that no answer can have.
        """
        texts, ids = params.get("stop"), params.get("stop_token_ids")
        hidden = self.special if params.get("skip_special_tokens", True) else {}
        added = [] if params.get("ignore_eos") else self.added
        for text in texts or ():
            if problem := unseen(text, hidden):
                raise EngineError(problem, where=f"stop {text!r}", remedy=REMEDY)
        named = [self.special[text] for text in texts or () if text in self.special]
        every = list(dict.fromkeys([*(ids or ()), *named, *added]))
        left = [text for text in texts or () if text not in self.special]
        return {"stop": left or None, "stop_token_ids": every or None}


REMEDY = "give the special token alone, which is then a token to stop at, or text without it"


def unseen(stop: str, special: Mapping[str, int] | Sequence[str]) -> str | None:
    """Why a text to stop at is never found in an answer; None if it may be. special: texts of the special tokens."""
    if whole(stop) != stop:
        return "it has half a character, which no answer has"
    inside = next((token for token in special if token in stop and token != stop), None)
    return f"it holds the special token {inside}, which an answer's text does not have" if inside else None


def unseen_by_row(
    metadata: Mapping[str, Any], special: Mapping[str, int] | Sequence[str], size: int
) -> str | None:
    """Why a row's own stops, in its metadata, are never found in an answer; None if they may be.

    special: texts of the special tokens, if an answer's text lacks them. size: of the vocabulary.
    """
    own = metadata.get(SAMPLING) or {}
    for text in own.get(STOP, ()):
        if problem := unseen(text, special):
            return f"bad {SAMPLING}: {STOP} {text!r}: {problem}"
    token = next((token for token in own.get(STOP_IDS, ()) if token >= size), None)
    return (
        None
        if token is None
        else f"bad {SAMPLING}: {STOP_IDS} names {token}, and the vocabulary has {size} tokens"
    )
