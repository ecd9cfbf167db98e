"""Text in and out: the tokenizer file, end-of-sequence ids and stop strings."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from millrace.connectors.engines.embedded.sampling import RequestError, SamplingParams
from millrace.core.families.tokenizer_file import before_text_of, engine_ends, load_tokenizer_file
from millrace.core.plain_text import whole


@dataclass(frozen=True)
class Stop:
    """A stop string that was found, and the text before it."""

    stop: str
    text: str


class Text:
    """The tokenizer of a model folder. A folder without tokenizer.json serves token ids only."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self.tokenizer: Any = load_tokenizer_file(path) if path.exists() else None
        self.eos = set(engine_ends(folder))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises RequestError without a tokenizer."""
        if self.tokenizer is None:
            raise RequestError("text: this model has no tokenizer.json; send input_ids")
        return [*self._before_text, *self.tokenizer.encode(whole(text), add_special_tokens=False).ids]

    @cached_property
    def _before_text(self) -> list[int]:
        return before_text_of(self.tokenizer)

    def decode(self, ids: list[int], params: SamplingParams) -> str:
        """Text of token ids; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return text

    def find_pattern(self, output: list[int], params: SamplingParams) -> str | None:
        """The first of `stop_regex` that matches the text. Searches the whole text, since a match may start anywhere."""
        text = self.decode(output, params)
        return next((pattern for pattern in params.stop_regex if re.search(pattern, text)), None)

    def find_stop(self, output: list[int], params: SamplingParams) -> Stop | None:
        """The first stop string that the newest token completed."""
        reach = max(len(stop.encode()) for stop in params.stop)  # a token is at least a byte
        tail = self.decode(output[-reach - 8 :], params)
        if not any(stop in tail for stop in params.stop):
            return None
        text = self.decode(output, params)
        found = [(text.find(stop), stop) for stop in params.stop if stop in text]
        if not found:
            return None
        at, stop = min(found)
        return Stop(stop, text if params.no_stop_trim else text[:at])
