"""The prompt that a served teacher reads: the sample's prompt with the hint of the user's function.

Owns the hint's place in the prompt, and the resulting tokens. Knows nothing of servers.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import NamedTuple

from millrace.connectors.teachers.served_teacher import FIELD
from millrace.core.config import RunConfig
from millrace.core.contracts.rows.chat_options import chat_options
from millrace.core.contracts.rows.prompts import Prompt
from millrace.core.contracts.sample import AskedAbout
from millrace.tasks.runtime.prompts import Prompts
from millrace.tasks.runtime.scoring import Scoring


class HintError(Exception):
    """Why a sample has no hint."""


class Hinted(NamedTuple):
    """Tokens of the prompt with the hint, and then of the response; the hint is None if the function gives none."""

    tokens: Sequence[int]
    hint: str | None


class Hints:
    """Asks the function of algorithm.teacher_server.hint about samples."""

    def __init__(self, config: RunConfig, scoring: Scoring, prompts: Prompts) -> None:
        assert config.algorithm.teacher_server is not None
        self.function = config.algorithm.teacher_server.hint
        self._sources = {source.name: source for source in config.data.sources}
        self._scoring = scoring
        self._prompts = prompts

    async def hinted(self, row: AskedAbout) -> Hinted:
        """The tokens that the teacher scores for a sample with a response. Errors: HintError."""
        tokens = row["tokens"]
        if self.function is None:
            return Hinted(tokens, None)
        outcome = await self._scoring.hint(self.function, f"{FIELD}.hint", row)
        if outcome.kind != "done":
            raise HintError(f"{FIELD}.hint: {outcome.reason}")
        if outcome.value is None:
            return Hinted(tokens, None)
        prompt = await asyncio.to_thread(self._tokens, row, outcome.value)
        return Hinted([*prompt, *tokens[-row["response_length"] :]], outcome.value)

    def _tokens(self, row: AskedAbout, hint: str) -> list[int]:
        source = self._sources[row["source"]]
        metadata = json.loads(row["metadata"]) if row["metadata"] else {}
        (tokens,) = self._prompts.tokenizer.encode_prompts(
            [with_hint(json.loads(row["prompt"]), hint, chat=source.chat)],
            chat=source.chat,
            system=source.system,
            options=[chat_options(source, metadata)],
        )
        return tokens


def with_hint(prompt: Prompt, hint: str, *, chat: bool) -> Prompt:
    """The prompt with the hint at the end of its last user message; before a plain text, whose end the response continues.

    Errors: HintError if no message is the user's.
    """
    if isinstance(prompt, str):
        return f"{prompt}\n\n{hint}" if chat else f"{hint}\n\n{prompt}"
    messages = list(prompt)
    at = next((at for at in reversed(range(len(messages))) if messages[at]["role"] == "user"), None)
    if at is None:
        raise HintError(f"{FIELD}.hint: the prompt has no message of a user, which the hint is added to")
    messages[at] = {**messages[at], "content": f"{messages[at]['content']}\n\n{hint}"}
    return messages
