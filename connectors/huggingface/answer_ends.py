"""The tokens at which an engine ends an answer, made consistent when a model's files disagree.

The chat template writes the token that ends a turn, the tokenizer names the end of sequence, and engines stop at the tokens in
generation_config.json or config.json. In some published or trained models these differ, and an answer would run on to the token
limit. Owns the tokens that a request must add so that every engine stops at all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.contracts.rows.chat_options import SAMPLING, STOP, STOP_IDS
from millrace.core.errors import EngineError
from millrace.core.plain_text import whole


@dataclass(frozen=True)
class AnswerEnds:
    """Ids of the tokens that end an answer."""

    engine: tuple[int, ...] = ()  # engines stop at these by the model's files
    turn: int | None = None  # ends a turn in the chat template
    eos: int | None = None  # the tokenizer's end of sequence
    special: Mapping[str, int] = field(
        default_factory=dict
    )  # ids of special tokens by text; an answer's text has none of them

    @property
    def added(self) -> list[int]:
        """The tokens that the model's files lack. Requests add them, and so does an export."""
        named = (token for token in (self.turn, self.eos) if token is not None)
        return [token for token in dict.fromkeys(named) if token not in self.engine]

    @property
    def named(self) -> dict[str, list[int]]:
        """The tokens in the model's files, and the tokens that requests add."""
        return {"model": list(self.engine), "requests": self.added}

    def trained(self, chat: bool) -> int | None:
        """The token that ends a reference answer. chat: the chat template writes the prompt."""
        return self.turn if chat and self.turn is not None else self.eos

    def stops(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The `stop` and `stop_token_ids` to send for a request's. A text that is a special token becomes its id, for every engine.

        Raises EngineError for a text that no answer can contain.
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


REMEDY = "give only the special token, and answers stop at it, or give text without it"


def unseen(stop: str, special: Mapping[str, int] | Sequence[str]) -> str | None:
    """Why no answer can contain this stop text; None if it can. special: texts of the special tokens."""
    if whole(stop) != stop:
        return "it has half a character, which no answer has"
    inside = next((token for token in special if token in stop and token != stop), None)
    return f"it holds the special token {inside}, which an answer's text does not have" if inside else None


def unseen_by_row(
    metadata: Mapping[str, Any], special: Mapping[str, int] | Sequence[str], size: int
) -> str | None:
    """Why no answer can contain one of the stops in a row's metadata; None if it can contain all.

    special: texts of the special tokens, if answers' texts lack them. size: of the vocabulary.
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
